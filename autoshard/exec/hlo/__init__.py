"""Analysis of optimised HLO: computations, collectives, work, and the estimated time of a scheduled program."""
