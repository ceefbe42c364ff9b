"""A plan on PyTorch modules: DTensor placements, and split functions where DTensor has none."""
