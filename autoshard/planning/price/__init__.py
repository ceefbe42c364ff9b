"""Costs of a chosen plan: seconds, bytes, the bill of a step and its timeline."""
