"""Choosing: `Problem` in, `Solution` out. Knows nothing of machine learning."""
