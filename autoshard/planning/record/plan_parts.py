"""What a plan consists of: predictions, pins, calls, regions, spans, and the meshes that were tried."""

import dataclasses

from autoshard.planning.record.spec import Spec


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Predicted communication of one kind over one set of mesh axes, summed over the step."""

    kind: str
    """`all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all` or `collective-permute`."""
    axes: tuple[str, ...]
    count: int
    """Executions in one step: loop trips counted, branches of a conditional by their share, rounded up."""
    wire_bytes: int
    """Bytes that one device puts on the wire in one step."""
    seconds: float
    hidden: bool
    cause: str = ""
    """Name of the tensor or op that causes most of it."""
    line: str = ""
    """Where the code asks for that op, `model.py:12`; empty if it is not known."""
    exposed_s: float | None = None
    """The part of `seconds` that compute waits for; None in plans that were saved before it was kept."""

    @property
    def waited_s(self) -> float:
        """The same, in older plans all or nothing."""
        return self.exposed_s if self.exposed_s is not None else 0.0 if self.hidden else self.seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What the cost model says of one set of specs. Times in seconds, sizes in bytes of one device."""

    step_time_s: float
    compute_s: float
    hidden_comm_s: float
    exposed_comm_s: float
    mfu: float | None
    peak_bytes: int
    memory: dict[str, int]
    """Bytes by kind at the peak: parameters, optimizer_state, batch, gradients, activations, temporaries, gathered."""
    fits: bool
    wire_bytes: dict[str, int]
    """Bytes that one device puts on the wire in one step, by mesh axis."""
    collectives: tuple[Collective, ...] = ()
    peak_at: str = ""
    """The op at which memory peaks."""
    tight_s: float = 0.0
    """Seconds beyond `step_time_s` that nearly full memory is expected to add: plans are ranked by both together."""
    host_bytes: int = dataclasses.field(default=0, metadata={"absent": 0})
    """Bytes that the program keeps in its host's memory for one device; not in a plan's file where there are none."""

    @property
    def expected_s(self) -> float:
        """Seconds of a step with what a full memory is expected to cost on top."""
        return self.step_time_s + self.tight_s


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """One intermediate value whose spec propagation alone would not find.

    `op` counts the ops of the inlined module in pre-order (see `graph.number_ops`); the value is
    result `index` of that op. `operand` is None to constrain the value for all its uses, or
    `(user_op, operand_number)` to constrain it for that one use (a reshard in front of one consumer).
    """

    op: int
    index: int
    spec: Spec
    operand: tuple[int, int] | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """An opaque call that every device makes on its shards."""

    op: int
    """Number of the op, as in `Pin`."""
    name: str
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    summed: tuple[str, ...] = ()
    """Mesh axes over which results are summed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unruled:
    """Ops of one kind that every device repeats whole because nobody said what may be split in them."""

    kind: str
    """Kind of op, or target of a custom call."""
    custom_call: bool
    count: int
    """Ops in the program; in a loop each counts once."""
    seconds: float
    """What these ops take of the predicted step, in seconds."""
    share: float
    """Their share of the predicted step."""
    example: str
    """The source's name for the costliest of them, may be empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """One op that devices compute shard by shard, not XLA's partitioner.

    A windowed op (a convolution, a pool) that is split in space, whose shards exchange halos; or a convolution of
    groups, which the partitioner gets wrong.

    `op` counts as in `Pin`. Specs are those of its operands and results inside; each device holds a part of a sum
    over the axes `summed`.
    """

    op: int
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    summed: tuple[str, ...]
    name: str = ""


WAITS_FOR_HOST = "waiting for host memory"
"""The name of a span in which a block has done its compute, and what goes to its host or comes from there has not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One piece of work in the predicted step; in a loop, of all its trips together."""

    name: str
    lane: str
    """`compute`, `exposed` (communication that compute waits for), or the link that hidden communication uses."""
    start_s: float
    seconds: float
    block: int
    """The loop it belongs to, -1 for none. Links are busy for several blocks at once where these overlap."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldTensors:
    """Buffers of one name that one device holds from one kept moment to another."""

    name: str
    """Name of the argument or of the op that makes the tensor; `*` stands for the numbers of repeated layers."""
    kind: str
    """One of the kinds of `Prediction.memory`."""
    count: int
    """How many buffers they are."""
    bytes: int
    """Their size together, on one device."""
    first: int
    """Position in `Timeline.moments_s` of the first kept moment at which they are held."""
    last: int
    """Position of the last such moment."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """One way to run the step in its predicted time, and the memory of one device meanwhile."""

    end_s: float
    spans: tuple[Span, ...]
    moments_s: tuple[float, ...]
    """Seconds from the start of the step to each moment, in program order; several moments may have one time."""
    memory: dict[str, tuple[int, ...]]
    """Bytes by kind at every moment."""
    held: tuple[HeldTensors, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """What the memory consists of, the largest first; small tensors are left out. Not in a plan's file if unknown."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshTried:
    """One mesh that the search for the best one looked at."""

    mesh: str
    """The mesh as `--mesh` takes it, the major axis first."""
    layout: str
    """The physical axes that each axis is made of."""
    step_time_s: float | None
    """Step time of the best plan found on it; None where none was, or none was looked for."""
    bound_s: float | None
    """No plan on it takes less; None if that was not computed."""
    verdict: str
    """Whether it was chosen, or why not."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedOp:
    """What the ops of one name do in one step on one device, in loops in all trips together.

    Ops are put together where name, kind, source line, parameter and `bound` agree, the numbers of layers aside.
    """

    name: str
    """The source's name of the op, or of the tensor that is copied; empty for the rest of many small ones."""
    kind: str
    """Kind of op, or target of a custom call; `copy` for what is copied at no op."""
    line: str
    """Where the code asks for it, `model.py:12`; empty if it is not known."""
    parameter: str
    """The parameter that a matmul or the like takes or makes the gradient of; empty if there is none."""
    times: int
    """How often these ops are executed in one step."""
    compute_s: float
    """Seconds of compute; what a fusion reads and writes is counted at its last op."""
    host_s: float
    """Seconds of traffic to and from the host's memory, which runs beside compute."""
    sent_s: float
    """Seconds of all communication that brings operands, sums parts or brings results to where they are held."""
    waited_s: float
    """The part of `sent_s` that compute waits for."""
    flops: float
    """FLOPs of the matrix unit."""
    moved_bytes: float
    """Bytes read from and written to main memory."""
    wire_bytes: int
    """Bytes that the device puts on the wire."""
    bound: str
    """What it spends most time on: `compute`, `memory`, `network`, `overhead` (of starting ops) or `host`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterUse:
    """What one op takes and gives that takes a parameter of a torch module, and in which specs the plan has that."""

    parameter: str
    """Name of the parameter; a stack of layers has one use for all of them."""
    weight: Spec
    """The spec in which the op takes the parameter, over the dims of one layer's."""
    input_shape: tuple[int, ...]
    """Shape of the value that the op takes beside the parameter."""
    input: Spec
    """The spec in which the op takes that value."""
    output_shape: tuple[int, ...]
    """Shape of what the op gives."""
    output: Spec
    """The spec in which that is held."""


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """The spec that the plan has for all that one function of torch gives in one shape, in the forward pass."""

    function: str
    """Its name without what it is a part of: `add`, `layer_norm`, `transpose`."""
    shape: tuple[int, ...]
    spec: Spec
