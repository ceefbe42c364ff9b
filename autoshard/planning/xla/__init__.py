"""Behaviour of XLA's partitioner on a sharded program: states, reshards, pins, halos, tables."""
