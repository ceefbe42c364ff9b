"""Recipes: the decisions of a step beside mesh and sharding, searched together with them."""
