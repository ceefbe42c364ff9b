"""Reports of plans, comparisons and measurements as text on a terminal."""
