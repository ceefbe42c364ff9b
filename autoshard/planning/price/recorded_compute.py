"""Record of the calls to the cost model that price one op in one state."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Charge, Compute


class RecordedCompute:
    """`Compute` proxy that records every priced call as a charge, for one state at a time. Calls that it does not
    define go to `Compute` without a record.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.charges: list[Charge] = []

    def pop_charges(self, block: int, count: float) -> tuple[Charge, ...]:
        """Return the recorded calls as charges of `count` executions in a block, and clear the record (in place)."""
        charges, self.charges = self.charges, []
        return tuple(dataclasses.replace(charge, block=block, count=count) for charge in charges)

    def note(self, op: str, *amounts: Any, **properties: Any) -> NDArray[np.float64]:
        """Record a call named `op`, with the first element of each amount, and return the seconds of its charge, shape
        [1].
        """
        numbers = tuple(float(np.asarray(amount).reshape(-1)[0]) for amount in amounts)
        self.charges.append(Charge(op, tuple(sorted(properties.items())), numbers, -1, 1.0))
        return np.array([self.charges[-1].seconds(self.compute)])

    def used(self, efficiency: Any) -> Any:
        """Return an efficiency over that of large matmuls; None stands for the latter and gives 1."""
        return 1.0 if efficiency is None else np.asarray(efficiency) / self.compute.calibration.matmul_efficiency

    def dot_seconds(
        self, m: Any, n: Any, k: Any, batch: Any, dtype: str, size: Any, fused: Any = 0.0
    ) -> NDArray[np.float64]:
        """Record a matmul (`dot`), and return its seconds, shape [1]; arguments as in `Compute.dot_seconds`."""
        return self.note("dot", m, n, k, batch, size, fused, dtype=dtype)

    def op_seconds(self, flops: Any, size: Any, dtype: str = "bf16", efficiency: Any = None) -> NDArray[np.float64]:
        """Record an op of FLOPs and bytes (`op`), and return its seconds, shape [1]; arguments as in
        `Compute.op_seconds`.
        """
        return self.note("op", flops, size, self.used(efficiency), dtype=dtype)

    def extra_pass_seconds(self, flops: Any, dtype: str, efficiency: Any = None) -> NDArray[np.float64]:
        """Record a further pass over FLOPs (`again`), and return its seconds, shape [1]; arguments as in
        `Compute.extra_pass_seconds`.
        """
        return self.note("again", flops, self.used(efficiency), dtype=dtype)

    def attention_seconds(
        self, scores: Any, head: int, value_head: int, matmuls: int, dtype: str, size: Any
    ) -> NDArray[np.float64]:
        """Record an attention kernel (`attention`), and return its seconds, shape [1]; arguments as in
        `Compute.attention_seconds`.
        """
        return self.note("attention", scores, size, head=head, value_head=value_head, matmuls=matmuls, dtype=dtype)

    def step_seconds(self, steps: Any) -> NDArray[np.float64]:
        """Record grid steps of a kernel (`steps`), and return its seconds, shape [1]; arguments as in
        `Compute.step_seconds`.
        """
        return self.note("steps", steps)

    def memory_seconds(self, size: Any) -> NDArray[np.float64]:
        """Record a pass over memory (`stream`), and return its seconds, shape [1]; arguments as in
        `Compute.memory_seconds`.
        """
        return self.note("stream", size)

    def stage_seconds(self, rows: Any, length: Any, products: Any, size: Any) -> NDArray[np.float64]:
        """Record a stage of an fft (`stage`), and return its seconds, shape [1]; arguments as in
        `Compute.stage_seconds`.
        """
        return self.note("stage", rows, length, products, size)

    def sort_seconds(self, elements: Any, length: int, arrays: int, size: Any) -> NDArray[np.float64]:
        """Record a sort (`sort`), and return its seconds, shape [1]; arguments as in `Compute.sort_seconds`."""
        return self.note("sort", elements, size, length=length, arrays=arrays)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the proxied `Compute`."""
        return getattr(self.compute, name)
