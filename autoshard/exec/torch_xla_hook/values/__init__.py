"""Tensors of the lazy backend, their marks, and kernels on the XLA device."""
