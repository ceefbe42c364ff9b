"""A planned step run here: its time, what its profile says, and whether it computes the same."""
