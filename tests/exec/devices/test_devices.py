"""CPU devices that stand in for a machine."""

import os
import subprocess
import sys


THREADS = """
from pathlib import Path
from autoshard.exec import ensure_devices

ensure_devices(8)
import jax

print(len(jax.devices()))
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print(sum(name == "tf_XLAEigen" for name in names))
"""


def threads(**variables: str) -> int:
    env = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PJRT_NPROC", "NPROC")}
    env |= {"JAX_PLATFORMS": "cpu"} | variables
    found = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, check=True)
    devices, count = map(int, found.stdout.split())
    assert devices == 8
    return count


def test_a_kernel_that_waits_in_every_device_leaves_a_thread_that_works() -> None:
    assert threads() >= 9


def test_what_the_user_says_of_threads_stands() -> None:
    assert threads(PJRT_NPROC="12") == 12
