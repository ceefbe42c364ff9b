"""How the tests have XLA compile for CPUs: they compile many programs and run each of them a few times."""

QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Flags for `XLA_FLAGS`: LLVM optimizes nothing, and loops are written by the emitters that compile in a third of the
time. The partitioner and XLA's own passes before them are not changed by it."""
