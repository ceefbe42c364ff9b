"""The real compiler with no device: libtpu in a process of its own, and what it says of a plan."""
