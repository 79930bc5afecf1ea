"""Compiled CPU kernels of a step, optional everywhere (see `engine.device.native.library`)."""
