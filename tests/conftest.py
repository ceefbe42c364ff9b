"""Eight CPU devices and quick compilation for every test: set before anything imports jax."""

import os


_COUNT = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["AUTOSHARD_CACHE_DIR"] = ""  # nothing of an earlier run, nothing left in the home of whoever tests
os.environ["AUTOSHARD_DATA_DIR"] = ""
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
# Tests compile many programs and run each a few times. The partitioner and XLA's own passes are not changed by it.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
