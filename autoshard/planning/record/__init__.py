"""The answer: plans, specs, and how they are written and read."""
