"""Local search, message passing and pruning for problems that exact reductions leave too large."""
