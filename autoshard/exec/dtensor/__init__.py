"""A plan on PyTorch modules: DTensor placements, and functions split where DTensor cannot."""
