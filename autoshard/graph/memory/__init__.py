"""Memory of a graph: fusions, stored values and their lifetimes."""
