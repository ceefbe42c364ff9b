"""What XLA's partitioner makes of a spec: states, reshards, pins, halos, tables."""
