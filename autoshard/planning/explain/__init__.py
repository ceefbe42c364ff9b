"""A plan written down for people and for XLA: words, pins, regions and explanations."""
