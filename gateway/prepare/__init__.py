"""From a body's bytes to token ids, within bounds, large bodies in a process of their own."""
