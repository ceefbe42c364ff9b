"""A program's graph as boxes, pictures and files."""
