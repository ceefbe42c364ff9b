"""Scripts that measure autoshard; README.md has what each of them answers."""
