"""Eight CPU devices and quick compilation for every test: set before anything imports jax."""

import gc
import os

from tests.compiling import QUICKLY


_COUNT = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["AUTOSHARD_CACHE_DIR"] = ""  # no entries of earlier runs, and none left in the home directory
os.environ["AUTOSHARD_DATA_DIR"] = ""
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
os.environ["XLA_FLAGS"] += f" {QUICKLY}"
# Tracing creates many long-lived objects. Garbage collections of all of them would be a tenth of the time.
gc.set_threshold(20_000, 20, 10)
