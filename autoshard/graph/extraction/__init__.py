"""Extraction of an `OpGraph` from a module: ops, loops, constraints and sharding rules."""
