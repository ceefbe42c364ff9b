"""What may be chosen: dim groups, strategies, what is held, and what was asked for."""
