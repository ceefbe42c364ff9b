"""Decisions of a plan: dim groups, strategies, baselines and constraints."""
