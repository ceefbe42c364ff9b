"""Many meshes: which are tried, in which order, and which is chosen."""
