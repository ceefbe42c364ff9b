"""Plans, comparisons and measurements as text on a terminal."""
