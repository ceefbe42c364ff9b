"""Record of the calls to the cost model that price one op in one state."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Charge, Compute


class RecordedCompute:
    """`Compute` proxy that records every priced call as a charge, for one state at a time."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.charges: list[Charge] = []

    def pop_charges(self, block: int, count: float) -> tuple[Charge, ...]:
        """Return the recorded calls as charges of `count` executions in a block, and clear the record."""
        charges, self.charges = self.charges, []
        return tuple(dataclasses.replace(charge, block=block, count=count) for charge in charges)

    def note(self, op: str, *amounts: Any, **properties: Any) -> None:
        numbers = tuple(float(np.asarray(amount).reshape(-1)[0]) for amount in amounts)
        self.charges.append(Charge(op, tuple(sorted(properties.items())), numbers, -1, 1.0))

    def dot_seconds(
        self, m: Any, n: Any, k: Any, batch: Any, dtype: str, size: Any, fused: Any = 0.0
    ) -> NDArray[np.float64]:
        self.note("dot", m, n, k, batch, size, fused, dtype=dtype)
        return self.compute.dot_seconds(m, n, k, batch, dtype, size, fused)

    def op_seconds(self, flops: Any, size: Any, dtype: str = "bf16", efficiency: Any = None) -> NDArray[np.float64]:
        used = 1.0 if efficiency is None else np.asarray(efficiency) / self.compute.calibration.matmul_efficiency
        self.note("op", flops, size, used, dtype=dtype)
        return self.compute.op_seconds(flops, size, dtype, efficiency)

    def extra_pass_seconds(self, flops: Any, dtype: str, efficiency: Any = None) -> NDArray[np.float64]:
        used = 1.0 if efficiency is None else np.asarray(efficiency) / self.compute.calibration.matmul_efficiency
        self.note("again", flops, used, dtype=dtype)
        return self.compute.extra_pass_seconds(flops, dtype, efficiency)

    def attention_seconds(
        self, scores: Any, head: int, value_head: int, matmuls: int, dtype: str, size: Any
    ) -> NDArray[np.float64]:
        self.note("attention", scores, size, head=head, value_head=value_head, matmuls=matmuls, dtype=dtype)
        return self.compute.attention_seconds(scores, head, value_head, matmuls, dtype, size)

    def step_seconds(self, steps: Any) -> NDArray[np.float64]:
        self.note("steps", steps)
        return self.compute.step_seconds(steps)

    def sort_seconds(self, elements: Any, length: int, arrays: int, size: Any) -> NDArray[np.float64]:
        self.note("sort", elements, size, length=length, arrays=arrays)
        return self.compute.sort_seconds(elements, length, arrays, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compute, name)
