"""One mesh: the integer program, its weights and floors, and its solution."""
