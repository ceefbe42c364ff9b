"""How the tests have XLA compile for CPUs: they compile many programs and run each of them a few times."""

import importlib.metadata


_FUSION_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
"""Loops are written by the emitters that compile in a third of the time. jaxlib 0.11 has no others and ends a process
that names the flag."""

QUICKLY = "--xla_backend_optimization_level=0"
"""Flags for `XLA_FLAGS`: LLVM optimizes nothing. The partitioner and XLA's own passes before it are not changed."""
if importlib.metadata.version("jaxlib").startswith("0.10."):
    QUICKLY += f" {_FUSION_EMITTERS}"
