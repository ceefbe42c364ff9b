"""Foundations that every room uses and that know nothing of sharding: processes, workers, files and the disk cache."""
