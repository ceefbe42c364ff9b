"""Immutable records of one program's ops, tensors, loops and sharding rules."""

import dataclasses
import enum
import math
import operator

from autoshard.mlir import WindowedDim


class FactorKind(enum.StrEnum):
    """What may happen to a factor that a mesh axis splits (Shardy's op sharding rule)."""

    PARALLEL = "parallel"
    REDUCTION = "reduction"
    NEED_REPLICATION = "need_replication"
    PERMUTATION = "permutation"


class OpClass(enum.StrEnum):
    """How the planner treats an op."""

    FREE = "free"
    """Constants, iota and what is derived from them alone: generated in any spec at no cost."""
    POINTWISE = "pointwise"
    """All operands and results share their dims; merged with its neighbours into a cluster."""
    VIEW = "view"
    """Reshape with merged or split dims, broadcast, reduce: maps one spec to another, chosen by its neighbours."""
    LAYER = "layer"
    """Takes one slice of, or writes one slice into, a stacked tensor."""
    HEAVY = "heavy"
    """Everything else (matmuls, convolutions, gathers, concatenations ...): strategies of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Factors of one op, and the factors (major first) that make up each dim of each operand and result."""

    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Halo:
    """A factor that can be split in space if shards borrow elements from their neighbours."""

    factor: int
    dim: WindowedDim


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One value of the program."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    producer: int
    """Op that makes it, -1 for an argument or a loop's carried value."""
    loop: int
    """Loop whose body it lives in, -1 for the top level."""
    value: tuple[int, int]
    """(op number, result index) in the inlined module; (-1, argument number) for an argument of the module;
    (op number of the loop, number of its results + k) for the k-th carried value inside the body."""
    name: str = ""
    manual: tuple[str, ...] = ()
    """Axes that the program itself has split it over (inside a `shard_map`): they are not there to plan with."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 0 of a tensor without elements."""
        return self.bytes // max(1, self.elements)


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """What is known of a custom call."""

    target: str
    rule: Rule | None
    flops: int = 0
    traffic: int = 0
    on_shards: bool = False
    """True if it is run on shards by the plan's own doing, False if the partitioner splits it, or nobody."""
    fixed: bool = False
    """True if it holds code for whole tensors, so that no device can run it on a shard."""
    dtype: str = ""
    """The dtype in which most of its FLOPs multiply; empty if it is not known."""
    head: int = 0
    """The head dim over which one of jax's attention kernels multiplies; 0 for any other call."""
    sloping: tuple[tuple[int, int], ...] = ()
    """(factor, blocks): the work grows evenly along it from next to none, so that parts of it are not alike."""
    steps: int = 0
    """Steps of a Pallas kernel's grid, without those that a mask skips."""
    uneven: tuple[tuple[int, float], ...] = ()
    """The (factor, times): where the factor is split, the busiest part has so many times the mean work."""
    sent: float = 1.0
    """Share of the rows of a call that exchanges them between devices which is real, and sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One op of the program, in program order."""

    id: int
    number: int
    """Position in the inlined module (`number_ops`); -1 for one that the compiler inserts (`rounded`)."""
    kind: str
    """`dot_general`, `reduce`, ...: the op's name without its dialect."""
    op_class: OpClass
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None
    loop: int
    flops: int
    name: str
    """The source's own name for it (JAX name stack or torch module path), may be empty."""
    operand_numbers: tuple[int, ...]
    """Position of each of `operands` among the op's operands in the module."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Groups of devices of a collective that the program itself does, or (source, target) pairs."""
    manual: tuple[str, ...] = ()
    """Axes that the program itself has split the op over: they may split `fixed` factors only."""
    fixed: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """(factor, axes that split it and nothing else) where a region by hand begins or ends."""
    seats: tuple[tuple[int, int], ...] = ()
    """Every use of the one operand of an op made of several: (number of the op in the module, operand)."""
    shift: int = 0
    """The number of places by which a `rotate` shifts."""
    opaque: Opaque | None = None
    """For a custom call, what is known of it."""

    halos: tuple[Halo, ...] = ()
    """Factors along which windows reach into neighbouring shards, in the order in which halos are exchanged."""
    offsets: tuple[tuple[int, int], ...] = ()
    """Dims that a slice or pad cuts or lengthens: (factor, where the result begins in the operand)."""
    grouped: bool = False
    """True for a convolution of groups (of features or of the batch), which the partitioner may split wrongly."""
    passes: int = 1
    """How often a unit that multiplies in bfloat16 runs a matmul of float32: more than once above default precision."""
    line: str = ""
    """Where the user's own code asks for it, `model.py:12`; may be empty."""
    strided: tuple[int, ...] = ()
    """Dims of which a slice takes elements that lie apart, or in which a pad puts places between elements."""
    steps: int = 0
    """Steps of a kernel's grid, without those that a mask skips."""
    sloping: tuple[tuple[int, int], ...] = ()
    """The (factor, blocks) of a call along which its work grows evenly from next to none: its parts are not alike."""

    @property
    def sides(self) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
        """Every operand and then every result, with the factors of each of its dims; only of an op with a rule."""
        assert self.rule is not None
        factors = (*self.rule.operands, *self.rule.results)
        return list(zip((*self.operands, *self.results), factors, strict=True))

    @property
    def label(self) -> str:
        """Kind and name for people: `dot_general layers/mlp`, `my_kernel layers/attention`."""
        kind = self.opaque.target if self.opaque else self.kind
        return f"{kind} {self.name}" if self.name and self.name != kind else kind


@dataclasses.dataclass(frozen=True, slots=True)
class Carry:
    """One carried value of a loop; all four tensors must have one spec and share one buffer."""

    init: int
    body: int
    update: int
    result: int


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A `while` with a known or assumed number of trips, or one branch of a `case` or `if`."""

    id: int
    number: int
    parent: int
    trips: int
    known: bool
    """False if the number of trips could not be read from the program; it is then counted as one."""
    carries: tuple[Carry, ...]
    start: int
    """First op of the body, as op id."""
    stop: int
    """One past the last op of the body."""
    width: int
    """Carried values of the `while` op, those that the body does not change included."""
    branches: int = 0
    """For one branch of a conditional, which is no loop but a block of its own too: how many branches there are."""


@dataclasses.dataclass(frozen=True, slots=True)
class AxisUse:
    """A mesh axis as the program itself names it."""

    name: str
    part: tuple[int, int] | None = None
    """(size of what comes before, size) of a part of the axis; None for the whole axis."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """What the program says of one value."""

    dims: tuple[tuple[AxisUse, ...], ...]
    """Axes that split each dim, major first."""
    open: tuple[bool, ...]
    """Dims that may be split further."""
    whole: tuple[AxisUse, ...] = ()
    """Axes that are known to split nothing of the tensor."""
    unreduced: tuple[AxisUse, ...] = ()
    """Axes over which the value is still to be summed."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes and sizes of the mesh that the program names."""
    tiles: str = ""
    """GSPMD's text, which names no axes; then `dims` are empty and only a mesh tells what it means."""

    @property
    def is_free(self) -> bool:
        return not self.tiles and all(self.open) and not any(self.dims) and not self.whole and not self.unreduced


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A spec that the program itself asks for."""

    tensor: int
    sharding: Sharding
    where: str
    """What asks, for a person: `with_sharding_constraint f/g at model.py:12`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Manual:
    """A region that the program splits by hand (`shard_map`): its values are what one device holds."""

    number: int
    axes: tuple[str, ...]
    """Axes that the region splits by hand; the others are free inside."""
    mesh: tuple[tuple[str, int], ...]
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class OpGraph:
    """The whole step: ops in program order with loops' bodies inlined once."""

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    loops: tuple[Loop, ...]
    arguments: tuple[int, ...]
    """Tensor of every argument, in module order."""
    results: tuple[int, ...]
    """Tensor of every result, in module order."""
    constraints: tuple[Constraint, ...]
    without_rule: tuple[int, ...]
    """Ops planned as replicated, for lack of a rule."""
    module_hash: str = ""
    """`structure_hash` of the inlined module that op numbers count in."""
    regions: tuple[Manual, ...] = ()
    """Regions that the program splits by hand, in order."""

    def trips(self, loop: int) -> float:
        """Executions in one step of an op whose loop is `loop`; each branch of a conditional runs equally often."""
        count = 1
        while loop >= 0:
            record = self.loops[loop]
            count = count / record.branches if record.branches > 1 else count * record.trips
            loop = record.parent
        return count

    @property
    def flops(self) -> int:
        """Matmul and convolution FLOPs of one step, loop trips counted, unsharded."""
        return round(sum(op.flops * self.trips(op.loop) for op in self.ops))


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """One kernel: the op that ends it, the values it writes and the values in memory that it reads."""

    root: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    """A slice of what is in memory stands for itself: only the slice is read."""
    moved: tuple[int, ...]
    """Values whose bytes are written: `writes`, or the slice that is put into a stack in place."""
    beside: bool = False
    """True if the kernel of an earlier fusion does its work, and nothing is started for it."""


_OP_FIELDS, _TENSOR_FIELDS = (
    operator.attrgetter(*(field.name for field in dataclasses.fields(record))) for record in (Op, Tensor)
)
_OPERANDS, _PRODUCER = (
    [field.name for field in dataclasses.fields(record)].index(name)
    for record, name in ((Op, "operands"), (Tensor, "producer"))
)


def renumbered(op: Op, number: int, operands: tuple[int, ...]) -> Op:
    """The same op with another id and operands; of a large program `dataclasses.replace` takes seconds."""
    if op.id == number and op.operands == operands:
        return op
    _, *fields = _OP_FIELDS(op)
    fields[_OPERANDS - 1] = operands
    return Op(number, *fields)


def made_by(tensor: Tensor, producer: int) -> Tensor:
    """The same tensor, made by another op."""
    if tensor.producer == producer:
        return tensor
    fields = list(_TENSOR_FIELDS(tensor))
    fields[_PRODUCER] = producer
    return Tensor(*fields)


def is_batched(op: Op) -> bool:
    """Return True for a dot with batch dims."""
    if op.kind != "dot_general" or op.rule is None:
        return False
    left, right, out = ({f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0]))
    return bool(left & right & out)
