"""The simulated engine: the production scheduler with a runner that computes no model."""
