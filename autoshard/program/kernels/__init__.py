"""Attention, caches and grouped matmuls as kernels that the planner knows how to split."""
