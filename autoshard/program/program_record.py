"""The record that every source produces: one StableHLO module with named, shaped arguments."""

import dataclasses
import enum
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.base.providers import provider
from autoshard.mlir import canonical_text


class Role(enum.StrEnum):
    """The purpose of an argument, which decides its treatment by the baselines."""

    PARAMETER = "parameter"
    FROZEN = "frozen"
    """A weight that a training step leaves unchanged."""
    OPTIMIZER_STATE = "optimizer_state"
    BATCH = "batch"
    """Data of one step, such as token ids and labels."""
    OTHER = "other"
    """Anything else: caches, counters, random keys, buffers, scalars."""


WEIGHTS = (Role.PARAMETER, Role.FROZEN)
"""Roles of the weights of a model."""


class Lifted(enum.StrEnum):
    """The sharding constraints of the program itself that are removed."""

    NONE = ""
    IDLE = "idle"
    """Constraints on a mesh of one device, which have no effect."""
    ALL = "all"
    """All constraints, at the user's request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One flat argument of the module, in module order."""

    name: str
    """Pytree path or torch parameter name, unique; a stacked layer parameter is `model.layers.*.mlp.up_proj.weight`."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the type in numpy or ml_dtypes: `float32`, `bfloat16`, `int32`, ..."""
    role: Role
    result: int | None = None
    """Index of the result that is the argument's updated value, with or without donation of its buffer."""
    donated: bool = False
    """True if the argument's buffer is donated to `result`, or to no particular result."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One flat result of the module, in module order."""

    name: str
    """Name of the argument that it updates, or a name of its own."""
    shape: tuple[int, ...]
    dtype: str
    argument: int | None = None
    """Index of the argument that the result updates; the result must have that argument's spec."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One step (training or inference) in canonical form, to be planned, run and compiled."""

    name: str
    fn: Callable[..., Any]
    """The canonical JAX function; `fn(*args)` takes and returns pytrees."""
    args: tuple[Any, ...]
    """Pytrees of `jax.ShapeDtypeStruct` (or arrays), one per positional argument of `fn`."""
    donate_argnums: tuple[int, ...]
    """Positions of the arguments of `fn` whose buffers are donated."""
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    module: bytes = dataclasses.field(repr=False)
    """StableHLO as MLIR bytecode, lowered without shardings, `keep_unused=True`: its arguments are `arguments`."""
    fingerprint: str
    """The sha256 (hex) of the module for CPUs without locations, and of the names and roles of the arguments."""
    training: bool = False
    """True if the step updates parameters or optimizer state, or was declared as training."""
    model_flops: float | None = None
    """FLOPs of one step, counted as for MFU; None if the source cannot count them.

    They are 6 (training) or 2 (inference) x matmul parameters x tokens, plus attention, of which causal counts half.
    Recomputation is not counted.
    """
    tokens: int | None = None
    """Number of tokens of one step; None if unknown or if the program has none."""
    layers: int | None = None
    """Number of layers whose rematerialisation can be chosen separately; None if the source has no such choice."""
    stacks: tuple[int, ...] = ()
    """Number of layers of each stack that may be cut into the stages of a pipeline."""
    pipeline: dict[str, Any] | None = None
    """Pipeline of the largest stack: `schedule`, `stages`, `microbatches`, `rounds`, `layers`; None without one."""
    weights: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, repr=False)
    """Parameter -> the names, in the model's files, of the tensors that it stacks; empty for JAX functions."""
    unpadded: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, repr=False)
    """Tensor of the model's files that the program pads with zeros -> its shape in the files."""
    dims: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, repr=False)
    """Argument -> the names of its dims if its source names them, as a Haliax `NamedArray` does."""
    savable: tuple[str, ...] = ()
    """Values of its layers that a remat policy may name, such as `self_attn.q_proj`, `context` and `input`."""
    block_classes: tuple[str, ...] = ()
    """Names of the classes of blocks in the outermost lists of modules of a torch module, sorted."""
    make_args: Callable[[int], tuple[Any, ...]] | None = None
    """Function of a seed that returns concrete host arrays for `args`: plausible initial values and valid ids."""
    notes: tuple[str, ...] = ()
    """Sentences about what the source changed or assumed; shown in reports."""
    exchange: str = "auto"
    """Exchange of attention if the sequence is split, one of `EXCHANGES`; `auto` selects the fastest."""
    lifted: Lifted = Lifted.NONE
    """The constraints of `fn` that are removed from the module that is planned and run."""
    on_host: str = "none"
    """State that `trace` or `open_source` keeps in the hosts' memory between steps, one of `HOSTS`."""
    source: dict[str, Any] | None = None
    """Arguments of `open_source`: `program`, `entry` and `options`; None for a program that was built in Python."""

    platform: str = "cpu"
    """XLA's name of the platform that `module` is lowered for, one of `PLATFORMS`."""
    lowerings: Any = dataclasses.field(default=None, repr=False, compare=False)
    """`Lowerings` of the step by platform; None if it has one only, as a StableHLO file does."""
    eager: Any = dataclasses.field(default=None, repr=False, compare=False)
    """An `EagerTwin` of the traced torch module, to compare with; None for other sources."""
    reduction: Any = dataclasses.field(default=None, repr=False, compare=False)
    """Function from the dim of examples of each input by name, -1 for none, to the `Reduced` of the examples in the
    result.

    It traces the torch module that the user gave; None for other sources.
    """

    def graph(self, plan: Any = None) -> Any:
        """Return the ops of the program and the tensors between them, as a `ProgramGraph`.

        Its `to_networkx()` converts it for networkx. With a `Plan` of this program it also has specs, predicted seconds
        and collectives. Raises `UserError` for a plan of another program or of another version.
        """
        return provider("graph")(self, plan)


def serialise(ir_module: Any, arguments: Sequence[Argument]) -> tuple[bytes, str]:
    """Return a module's MLIR bytecode, and the sha256 (hex) of its text without locations and of argument names and
    roles.
    """
    operation = ir_module.operation
    buffer = io.BytesIO()
    operation.write_bytecode(buffer)
    text = operation.get_asm(enable_debug_info=False, binary=False)
    digest = hashlib.sha256(text.encode())
    digest.update(json.dumps([[a.name, a.role.value] for a in arguments]).encode())
    return buffer.getvalue(), digest.hexdigest()


def step_fingerprint(ir_module: Any, arguments: Sequence[Argument]) -> str:
    """Return the sha256 (hex) of a captured module's canonical text, and of argument names and roles.

    It is the same for the module in memory and in a file that autoshard wrote.
    """
    digest = hashlib.sha256(canonical_text(ir_module).encode())
    digest.update(json.dumps([[a.name, a.role.value] for a in arguments]).encode())
    return digest.hexdigest()
