"""Sweeps: one program on several topologies, with several batches and remat policies."""
