"""Plans for readers and for XLA: words, pins, regions and explanations."""
