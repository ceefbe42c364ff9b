"""Devices of this machine, the memory that they retain, and their profiles."""
