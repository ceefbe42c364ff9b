"""Planning on one mesh: the integer program, its weights and lower bounds, and its solution."""
