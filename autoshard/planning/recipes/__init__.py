"""Recipes: the decisions of a step besides mesh and sharding, searched together with both."""
