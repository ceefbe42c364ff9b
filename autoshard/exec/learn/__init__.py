"""Refinement of cost figures: plan, judge, learn and plan again."""
