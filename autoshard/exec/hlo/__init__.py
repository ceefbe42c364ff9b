"""Optimised HLO as it is read: computations, collectives, work, and how long a scheduled program takes."""
