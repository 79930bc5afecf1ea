"""Compiled CPU kernels of the step outside its matrix products, optional everywhere (see `engine.native.library`)."""
