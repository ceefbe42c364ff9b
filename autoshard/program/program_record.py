"""The record that every source produces: one StableHLO module with named, shaped arguments."""

import dataclasses
import enum
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.base.providers import provider


class Role(enum.StrEnum):
    """What an argument is for; decides what baselines do with it."""

    PARAMETER = "parameter"
    FROZEN = "frozen"
    """A weight that a training step leaves as it is."""
    OPTIMIZER_STATE = "optimizer_state"
    BATCH = "batch"
    OTHER = "other"


WEIGHTS = (Role.PARAMETER, Role.FROZEN)
"""Roles of the weights of a model."""


class Lifted(enum.StrEnum):
    """Which of the sharding constraints that a program holds itself are taken out."""

    NONE = ""
    IDLE = "idle"
    """Those on a mesh of one device, which say nothing."""
    ALL = "all"
    """All of them, since the user asked for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One flat argument of the module, in module order."""

    name: str
    """Pytree path or torch parameter name, unique; a stacked layer parameter is `model.layers.*.mlp.up_proj.weight`."""
    shape: tuple[int, ...]
    dtype: str
    """The name that numpy or ml_dtypes has for it: `float32`, `bfloat16`, `int32`, ..."""
    role: Role
    result: int | None = None
    """Index of the result that replaces it: updated state, whether or not its buffer is donated."""
    donated: bool = False
    """True if the argument's buffer is donated to `result` (or to no particular result)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One flat result of the module, in module order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    argument: int | None = None
    """Index of the argument it replaces; its spec must equal that argument's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One step (training or inference), canonical, as it will be planned, run and compiled."""

    name: str
    fn: Callable[..., Any]
    """The canonical JAX function; `fn(*args)` takes and returns pytrees."""
    args: tuple[Any, ...]
    """Pytrees of `jax.ShapeDtypeStruct` (or arrays), one per positional argument of `fn`."""
    donate_argnums: tuple[int, ...]
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    module: bytes = dataclasses.field(repr=False)
    """StableHLO as MLIR bytecode, lowered without shardings, `keep_unused=True`: its arguments are `arguments`."""
    fingerprint: str
    """The sha256 (hex) over the module for CPUs without locations, and over names and roles of the arguments."""
    training: bool = False
    model_flops: float | None = None
    """FLOPs of one step counted the MFU way: 6 (training) or 2 (inference) x matmul parameters x tokens,
    plus attention with causal counted half; no recompute. None if the source cannot know it."""
    tokens: int | None = None
    layers: int | None = None
    """Layers whose rematerialisation can be chosen apart; None if the source has no such choice."""
    stacks: tuple[int, ...] = ()
    """Layers of each stack that may be cut into the stages of a pipeline."""
    pipeline: dict[str, Any] | None = None
    """What the largest stack is computed by: `schedule`, `stages`, `microbatches`, `rounds` and its `layers`; None if
    there are no stages."""
    weights: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, repr=False)
    """Parameter -> the tensors of the model, by their names in its files, that it stacks; empty of JAX functions."""
    dims: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, repr=False)
    """Argument -> the names of its dims, where its source gives them names: those of a Haliax `NamedArray`."""
    savable: tuple[str, ...] = ()
    """Values of its layers that a remat policy may name: `self_attn.q_proj`, `context`, `input`."""
    make_args: Callable[[int], tuple[Any, ...]] | None = None
    """`make_args(seed)` gives concrete host arrays for `args`: plausible initial values, valid ids."""
    notes: tuple[str, ...] = ()
    """Sentences about what the source changed or assumed; shown in reports."""
    exchange: str = "auto"
    """How queries meet keys and values where the sequence is split, of `EXCHANGES`; `auto`: as is fastest."""
    lifted: Lifted = Lifted.NONE
    """Which of the constraints that `fn` holds are not in what is planned and run."""
    on_host: str = "none"
    """What `trace` or `open_source` was asked to keep in the hosts' memory between steps, of `HOSTS`."""
    source: dict[str, Any] | None = None
    """What `open_source` opened: `program`, `entry` and `options`; None for a program made in Python."""

    platform: str = "cpu"
    """XLA's name of the platform that `module` is for, of `PLATFORMS`."""
    lowerings: Any = dataclasses.field(default=None, repr=False, compare=False)
    """`Lowerings` of the step by platform; None where it has one only, as in a StableHLO file."""
    eager: Any = dataclasses.field(default=None, repr=False, compare=False)
    """The torch module that the step was traced of, an `EagerTwin` to compare with; None for other sources."""

    def graph(self, plan: Any = None) -> Any:
        """The ops of the program and the tensors between them: a `ProgramGraph`, for networkx by its `to_networkx()`.

        With a `Plan` of this program it also has specs, predicted seconds and collectives. Raises `UserError` for a
        plan of another program, and for one that was made by another version.
        """
        return provider("graph")(self, plan)


def serialise(ir_module: Any, arguments: Sequence[Argument]) -> tuple[bytes, str]:
    """MLIR bytecode of a module, and the sha256 over its text without locations and over argument names and roles."""
    operation = ir_module.operation
    buffer = io.BytesIO()
    operation.write_bytecode(buffer)
    text = operation.get_asm(enable_debug_info=False, binary=False)
    digest = hashlib.sha256(text.encode())
    digest.update(json.dumps([[a.name, a.role.value] for a in arguments]).encode())
    return buffer.getvalue(), digest.hexdigest()
