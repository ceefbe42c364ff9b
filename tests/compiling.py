"""XLA flags of the tests for CPUs: they compile many programs and run each of them a few times."""

import importlib.metadata


_FUSION_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
"""Flag for loop emitters that compile in a third of the time. jaxlib 0.11 has only these and aborts if it is set."""

QUICKLY = "--xla_backend_optimization_level=0"
"""Flags for `XLA_FLAGS`: LLVM does not optimise. The partitioner and XLA's own passes before it are unchanged."""
if importlib.metadata.version("jaxlib").startswith("0.10."):
    QUICKLY += f" {_FUSION_EMITTERS}"
