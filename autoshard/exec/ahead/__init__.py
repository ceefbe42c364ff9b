"""Compilation for accelerators that are not present: libtpu in a separate process, and its verdict on a plan."""
