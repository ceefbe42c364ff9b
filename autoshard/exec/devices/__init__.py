"""The devices that are here, the memory they keep, and their profiles."""
