"""StableHLO's reference interpreter, which shares no code with XLA, and XLA itself on the local devices."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from autoshard.mlir.module import collect


ABORTING = ("dot", "custom_call", "batch_norm_training", "batch_norm_grad", "batch_norm_inference")
"""StableHLO's ops for which the interpreter ends the process."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """Axes of each dim, as the room reads them of a plan's spec."""

    dims: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Pin:
    """A value that is pinned: a result, or an operand at one op."""

    op: int
    index: int
    spec: Spec
    operand: tuple[int, int] | None = None


def interpreted(module: Any, *arguments: Any) -> list[np.ndarray]:
    """Return the results of `@main` as StableHLO's reference interpreter computes them."""
    present = {op.name for op in collect(module.operation, [f"stablehlo.{name}" for name in ABORTING])}
    assert not present, f"the interpreter would end the process at {present}"
    with module.context:
        given = [ir.DenseElementsAttr.get(np.array(argument, order="C")) for argument in arguments]
        return [np.array(result) for result in stablehlo.eval_module(module, given)]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compiled(lowered: Any, change: Any, *arguments: Any) -> Any:
    """Return the results of a lowered function whose module `change` rewrites in place before XLA compiles it."""
    change(lowered.compiler_ir("stablehlo"))
    return jax.tree.map(np.asarray, lowered.compile()(*arguments))
