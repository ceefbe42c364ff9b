"""Device files of the accelerators of this machine."""

import glob


PATTERNS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg", "/dev/accel*", "/dev/vfio/[0-9]*")
"""Patterns of the device files of GPUs and TPUs on Linux."""


def accelerator_files() -> list[str]:
    """Return the device files of GPUs and TPUs that are here; without any, JAX can find CPU devices only."""
    return [path for pattern in PATTERNS for path in glob.glob(pattern)]
