"""The plan as it is said to people and to XLA: words, pins, regions, explanations."""
