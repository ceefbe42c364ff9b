"""Execution of a planned step on the devices present: its time, its profile, and checks of its results."""
