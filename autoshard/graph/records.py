"""Immutable records of one program's ops, tensors, loops and sharding rules."""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

from autoshard.mlir import MeshAxes, Sharding, WindowedDim


Made = TypeVar("Made")


class FactorKind(enum.StrEnum):
    """Effect of splitting a factor over a mesh axis, as in Shardy's op sharding rules."""

    PARALLEL = "parallel"
    """Shards compute parts of the result; no collective."""
    REDUCTION = "reduction"
    """Shards compute partial results, which a collective combines."""
    NEED_REPLICATION = "need_replication"
    """No axis may split the factor."""
    PERMUTATION = "permutation"
    """Elements move along the factor, so shards must exchange them."""


class OpClass(enum.StrEnum):
    """Treatment of an op by the planner."""

    FREE = "free"
    """Constants, iota and values derived from them alone: generated in any spec at no cost."""
    POINTWISE = "pointwise"
    """Ops whose operands and results share all dims; merged with their neighbours into a cluster."""
    VIEW = "view"
    """Reshapes with merged or split dims, broadcasts and reduces: each maps one spec to another, which its neighbours
    choose.
    """
    LAYER = "layer"
    """Ops that read one slice of a stacked tensor, or write one slice into a stacked tensor."""
    HEAVY = "heavy"
    """All other ops (matmuls, convolutions, gathers, concatenations ...), which have strategies of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Factors of one op, and the factors (major first) that form each dim of each operand and result."""

    sizes: tuple[int, ...]
    """Size in elements of each factor."""
    kinds: tuple[FactorKind, ...]
    """Kind of each factor."""
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    """Factors of each dim of each operand."""
    results: tuple[tuple[tuple[int, ...], ...], ...]
    """Factors of each dim of each result."""


@dataclasses.dataclass(frozen=True, slots=True)
class Halo:
    """A factor that can be split in space if shards borrow elements from their neighbours."""

    factor: int
    """Number of the factor in the op's rule."""
    dim: WindowedDim
    """Window, and the dims along which it moves."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One value of the program."""

    id: int
    """Position in `OpGraph.tensors`."""
    shape: tuple[int, ...]
    """Sizes of the dims, unsharded, but inside a `shard_map` those of a shard."""
    dtype: str
    """Name of the dtype, such as `bfloat16`."""
    bytes: int
    """Bytes of the whole tensor, without padding."""
    producer: int
    """Id of the op that computes the tensor; -1 for an argument, and for a carried value or result of a loop."""
    loop: int
    """Id of the loop whose body contains the tensor; -1 for the top level."""
    value: tuple[int, int]
    """Place of the value in the inlined module, as a pair of numbers.

    - (op number, result index) for the result of an op;
    - (-1, argument number) for an argument of the module;
    - (op number of the loop, number of its results + k) for the k-th carried value inside the body.
    """
    name: str = ""
    """Name for display; may be empty."""
    manual: tuple[str, ...] = ()
    """Mesh axes over which an enclosing `shard_map` already splits the tensor, and which the planner cannot use for
    it.
    """

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 0 for a tensor without elements."""
        return self.bytes // max(1, self.elements)


TOP_K = "top_k"
"""Kind of the op that selects the largest elements of its last dim; XLA's partitioner gathers most of its splits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """Rule, work and restrictions of one custom call."""

    target: str
    """Name of the call's target."""
    rule: Rule | None
    """Sharding rule; None if none is known, so that the call stays whole."""
    flops: int = 0
    """FLOPs over all devices."""
    traffic: int = 0
    """Bytes that the call reads and writes, over all devices; 0 means each operand and result once."""
    on_shards: bool = False
    """True if the plan itself runs the call on shards; False if the partitioner splits the call, or if nothing does."""
    fixed: bool = False
    """True if the call contains code for whole tensors, so that no device can run it on a shard."""
    dtype: str = ""
    """Dtype in which most of the call's FLOPs multiply; empty if unknown."""
    head: int = 0
    """Size of the dim over which one of jax's attention kernels multiplies; 0 for any other call."""
    triangular: tuple[tuple[int, int], ...] = ()
    """The (factor, blocks) pairs along which work rises evenly from almost zero, so that shards differ in work."""
    steps: int = 0
    """Steps of a Pallas kernel's grid, without the steps that a mask skips."""
    imbalance: tuple[tuple[int, float], ...] = ()
    """The (factor, times) pairs: if the factor is split, the busiest shard has `times` the mean work."""
    sent_share: float = 1.0
    """Share of the rows that are real and so sent, for a call that exchanges rows between devices."""


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One op of the program, in program order."""

    id: int
    """Position in `OpGraph.ops`."""
    number: int
    """Position in the inlined module (`number_ops`); -1 for an op that the compiler inserts (`round_operands`)."""
    kind: str
    """Name of the op without its dialect: `dot_general`, `reduce`, ..."""
    op_class: OpClass
    """Treatment by the planner."""
    operands: tuple[int, ...]
    """Ids of its operands' tensors."""
    results: tuple[int, ...]
    """Ids of its results' tensors."""
    rule: Rule | None
    """Sharding rule; None if none is known."""
    loop: int
    """Id of the loop whose body contains the op; -1 for the top level."""
    flops: int
    """FLOPs of one run on the whole tensors."""
    name: str
    """The source's own name for the op (JAX name stack or torch module path); may be empty."""
    operand_numbers: tuple[int, ...]
    """Position of each of `operands` among the op's operands in the module."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Device groups of a collective that the program itself contains, or its (source, target) pairs."""
    manual: tuple[str, ...] = ()
    """Mesh axes that an enclosing `shard_map` splits by hand; here these axes may split `fixed` factors only."""
    fixed: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """The (factor, axes) pairs at an end of a `shard_map` region: exactly these axes split the factor."""
    operand_uses: tuple[tuple[int, int], ...] = ()
    """Every use of the single operand of an op that joins several: (op number in the module, operand position)."""
    shift: int = 0
    """Number of places by which a `rotate` shifts; 0 for other ops."""
    opaque: Opaque | None = None
    """Record of a custom call that is not fully known by its kind; None for other ops."""

    halos: tuple[Halo, ...] = ()
    """Factors along which windows reach into neighbouring shards, in the order in which halos are exchanged."""
    offsets: tuple[tuple[int, int], ...] = ()
    """Dims that a slice or pad shortens or lengthens: (factor, start of the result within the operand)."""
    grouped: bool = False
    """True for a convolution of feature or batch groups, which the partitioner may split wrongly."""
    passes: int = 1
    """Passes of a bfloat16 matrix unit for this matmul: more than one for float32 above default precision."""
    line: str = ""
    """Source line of the user's code that asks for the op, `model.py:12`; may be empty."""
    strided: tuple[int, ...] = ()
    """Dims in which a slice steps by more than one, or in which a pad inserts places between elements."""
    steps: int = 0
    """Steps of a kernel's grid, without the steps that a mask skips."""
    triangular: tuple[tuple[int, int], ...] = ()
    """The (factor, blocks) pairs along which a call's work rises evenly from almost zero, so that shards differ in
    work.
    """
    barriers: tuple[tuple[int, int], ...] = ()
    """The (position, barrier) pairs of operands that come through an optimization barrier, by its number."""
    kept_share: float = 1.0
    """Share of the elements that a select with a mask of positions takes from its computed operand; 1 for other ops."""

    def use(self, operand: int) -> tuple[int, int, int]:
        """Return (tensor, loop, barrier) of an operand by position: equal uses share one copy of the tensor.

        The barrier is -1 for none. Compilers merge no op before a barrier with one after it, so that recomputation
        gathers a weight again.
        """
        return self.operands[operand], self.loop, dict(self.barriers).get(operand, -1)

    @property
    def sides(self) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
        """Every operand and then every result, each with the factors of its dims; requires a rule."""
        assert self.rule is not None
        factors = (*self.rule.operands, *self.rule.results)
        return list(zip((*self.operands, *self.results), factors, strict=True))

    @property
    def on_shards(self) -> bool:
        """True if a plan can run the op on shards itself: an opaque call that accepts them, or a top-k."""
        return self.kind == TOP_K or (self.opaque is not None and self.opaque.on_shards)

    @property
    def label(self) -> str:
        """Kind and name for display: `dot_general layers/mlp`, `my_kernel layers/attention`."""
        kind = self.opaque.target if self.opaque else self.kind
        return f"{kind} {self.name}" if self.name and self.name != kind else kind


@dataclasses.dataclass(frozen=True, slots=True)
class Carry:
    """One carried value of a loop; all four tensors must have one spec and share one buffer."""

    init: int
    """Tensor before the loop."""
    body: int
    """Tensor inside the body, at the start of each trip."""
    update: int
    """Tensor that the body returns."""
    result: int
    """Tensor after the loop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A `while` with a known or assumed number of trips, or one branch of a `case` or `if`."""

    id: int
    """Position in `OpGraph.loops`."""
    number: int
    """Position of the `while` or conditional in the inlined module."""
    parent: int
    """Id of the loop around it; -1 for none."""
    trips: int
    """Runs of the body in one run of its parent, at least 1; 1 for a branch."""
    known: bool
    """True if the number of trips was read from the program; otherwise it counts as one. True for branches."""
    carries: tuple[Carry, ...]
    """Carried values that the body changes."""
    start: int
    """Op id of the first op of the body."""
    stop: int
    """Op id one past the last op of the body."""
    width: int
    """Number of carried values of the `while` op, including those that the body does not change."""
    branches: int = 0
    """Number of branches of the conditional, if this block is one of them; 0 for a real loop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A spec that the program itself requests for a tensor."""

    tensor: int
    """Id of the tensor."""
    sharding: Sharding
    """Axes that the program requests for each dim."""
    where: str
    """Origin of the request, for display: `with_sharding_constraint f/g at model.py:12`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Manual:
    """A region that the program splits by hand (`shard_map`); its inner values have the shapes of shards."""

    number: int
    """Position of the region's op in the inlined module."""
    axes: tuple[str, ...]
    """Axes that the region splits by hand; the planner may use the other axes inside."""
    mesh: MeshAxes
    """Axes of the region's mesh, with sizes."""
    where: str
    """Origin of the region, for display."""


@dataclasses.dataclass(frozen=True)
class OpGraph:
    """The whole step: ops in program order, with each loop's body inlined once.

    Maps derived from the fields, such as the users of every tensor, are computed once. Copies that are pickled lack
    them.
    """

    tensors: tuple[Tensor, ...]
    """Tensors by id."""
    ops: tuple[Op, ...]
    """Ops by id, in program order."""
    loops: tuple[Loop, ...]
    """Loops and branches by id, outer ones first."""
    arguments: tuple[int, ...]
    """Tensor id of every argument, in module order."""
    results: tuple[int, ...]
    """Tensor id of every result, in module order."""
    constraints: tuple[Constraint, ...]
    """Specs that the program requests."""
    without_rule: tuple[int, ...]
    """Ops that are planned as replicated because they have no rule."""
    module_hash: str = ""
    """`structure_hash` of the inlined module; op numbers are positions in this module."""
    regions: tuple[Manual, ...] = ()
    """Regions that the program splits by hand, in order."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone, without cached maps."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def maker(self, tensor: int) -> Op | None:
        """Return the op that computes a tensor; None for an argument, and for a carried value or result of a loop."""
        producer = self.tensors[tensor].producer
        return self.ops[producer] if producer >= 0 else None

    def once(self, make: Callable[["OpGraph"], Made]) -> Made:
        """Return `make(self)`, computed at the first call with this function."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    @functools.cached_property
    def _made(self) -> dict[Callable[["OpGraph"], Any], Any]:
        """Results of `once` by function."""
        return {}

    @functools.cached_property
    def users(self) -> tuple[tuple[Op, ...], ...]:
        """Ops that consume each tensor, in program order; an op that reads a tensor twice is listed once."""
        users: list[list[Op]] = [[] for _ in self.tensors]
        for op in self.ops:
            for tensor in set(op.operands):
                users[tensor].append(op)
        return tuple(map(tuple, users))

    @functools.cached_property
    def generated(self) -> frozenset[int]:
        """Results of ops of the class `FREE`."""
        return frozenset(t for op in self.ops if op.op_class is OpClass.FREE for t in op.results)

    @functools.cached_property
    def returned(self) -> frozenset[int]:
        """Results of the program, and the initial and updated values of its loops."""
        carries = (carry for loop in self.loops for carry in loop.carries)
        return frozenset(self.results).union(t for carry in carries for t in (carry.init, carry.update))

    def multiplied_dtype(self, op: Op) -> str:
        """Return the dtype in which most of an op's FLOPs multiply.

        It is the one that a call states, else that of the first operand, else that of the first result.
        """
        return (op.opaque.dtype if op.opaque else "") or self.tensors[(*op.operands, *op.results)[0]].dtype

    def trips(self, loop: int) -> float:
        """Return how often an op of block `loop` (-1: the top level) runs in one step.

        The number is the product of the trips of all loops around the op. Branches of a conditional share its runs
        equally, so it may be a fraction.
        """
        count = 1
        while loop >= 0:
            record = self.loops[loop]
            count = count / record.branches if record.branches > 1 else count * record.trips
            loop = record.parent
        return count

    def is_invariant(self, tensor: int, block: int) -> bool:
        """Return True if `block` is a loop (no branch) that does not change `tensor`, a value from outside of it."""
        if block < 0 or self.loops[block].branches:
            return False
        home, around = self.tensors[tensor].loop, self.loops[block].parent
        while around not in (-1, home):
            around = self.loops[around].parent
        return home != block and around == home

    def needed_until(self, tensor: int, user: int) -> int:
        """Return the last op id at which op `user` needs a value: `user`, or the end of a loop.

        A value from outside of a loop is needed until the last op of the outermost loop that contains `user` but not
        the value. A branch of a conditional runs once, so it does not extend the lifetime.
        """
        home, loop, moment = self.tensors[tensor].loop, self.ops[user].loop, user
        while loop != home and loop >= 0:
            if not self.loops[loop].branches:
                moment = max(moment, self.loops[loop].stop - 1)
            loop = self.loops[loop].parent
        return moment

    @property
    def flops(self) -> int:
        """FLOPs of the ops of one unsharded step, loop trips included."""
        return round(sum(op.flops * self.trips(op.loop) for op in self.ops))


def is_batched(op: Op) -> bool:
    """Return True for a dot with batch dims: factors that both operands and the result share."""
    if op.kind != "dot_general" or op.rule is None:
        return False
    left, right, out = ({f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0]))
    return bool(left & right & out)
