"""Exports to frameworks of PyTorch, and the styles and recipes that they share."""
