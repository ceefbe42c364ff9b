"""Scripts that measure autoshard; README.md lists the question that each script answers."""
