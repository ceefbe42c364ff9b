"""Parts of a plan: predictions, pins, calls, regions, spans, and the meshes that were tried."""

import dataclasses

from autoshard.planning.record.spec import Spec


NEARLY_FULL = 0.02
"""Share of a step that memory adds, from which on a step counts as one that nearly fills it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Predicted communication of one kind over one set of mesh axes, summed over the step."""

    kind: str
    """Kind of the collective: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all` or `collective-permute`."""
    axes: tuple[str, ...]
    """Mesh axes along which the devices communicate."""
    count: int
    """Executions in one step: every trip of a loop counts, and branches of a conditional count by their share, rounded
    up. A collective that the compiler makes of several counts once for each of its tensors.
    """
    wire_bytes: int
    """Bytes that one device sends in one step."""
    seconds: float
    """Seconds of all executions in one step, hidden or not."""
    hidden: bool
    """True if less than half of `seconds` is exposed."""
    cause: str = ""
    """Name of the tensor or op that causes most of the communication."""
    line: str = ""
    """Source line of that op, such as `model.py:12`; empty if unknown."""
    exposed_s: float | None = None
    """Part of `seconds` that compute waits for; None in plans saved before the field existed."""

    @property
    def waited_s(self) -> float:
        """The seconds that compute waits for: `exposed_s`, or in older plans 0 if `hidden`, else all of `seconds`."""
        return self.exposed_s if self.exposed_s is not None else 0.0 if self.hidden else self.seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of the cost model for one set of specs. Times are seconds, sizes are bytes of one device."""

    step_time_s: float
    """Seconds of one step: the sum of `compute_s` and `exposed_comm_s`."""
    compute_s: float
    """Seconds in which the device computes or moves its own memory; in pipelines with the bubbles."""
    hidden_comm_s: float
    """Seconds of communication that overlaps with compute, so is not part of `step_time_s`."""
    exposed_comm_s: float
    """Seconds in which compute waits for communication."""
    mfu: float | None
    """Model FLOPs utilisation between 0 and 1; None for a program without FLOPs."""
    peak_bytes: int
    """Largest live bytes at any moment of the step."""
    memory: dict[str, int]
    """Bytes by kind at the peak: parameters, optimizer_state, batch, gradients, activations, temporaries, gathered."""
    fits: bool
    """True if `peak_bytes` is at most the memory limit. A baseline with `eager_peak_bytes` must fit eager torch too."""
    wire_bytes: dict[str, int]
    """Bytes that one device sends in one step, by mesh axis."""
    collectives: tuple[Collective, ...] = ()
    """Collectives of one step, the longest first."""
    peak_at: str = ""
    """Name of the op at which memory peaks."""
    tight_s: float = 0.0
    """Seconds beyond `step_time_s` that nearly full memory is expected to add. Plans are ranked by the sum."""
    host_bytes: int = dataclasses.field(default=0, metadata={"absent": 0})
    """Bytes that the program stores in its host's memory for one device; absent from a plan's file if zero."""
    eager_step_time_s: float | None = dataclasses.field(default=None, metadata={"absent": None})
    """Seconds of the step in eager torch, for a form that gathers parameters; None if they are not known."""
    eager_peak_bytes: int | None = dataclasses.field(default=None, metadata={"absent": None})
    """Bytes of one device that the step needs in eager torch; None if they are not known."""

    @property
    def compared_s(self) -> float:
        """The seconds by which reports compare steps: those of eager torch where they are known."""
        return self.step_time_s if self.eager_step_time_s is None else self.eager_step_time_s

    @property
    def expected_s(self) -> float:
        """The seconds by which plans are ranked: `step_time_s` plus `tight_s`."""
        return self.step_time_s + self.tight_s

    @property
    def nearly_full(self) -> bool:
        """True if nearly full memory is expected to add more than `NEARLY_FULL` of the step."""
        return self.tight_s > NEARLY_FULL * self.step_time_s


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """One intermediate value whose spec propagation alone would not find.

    `op` counts the ops of the inlined module in pre-order (see `graph.number_ops`). The value is result `index` of that
    op. `operand` is None to constrain the value for all its uses. `(user_op, operand_number)` constrains it for that
    one use: a reshard in front of one consumer.
    """

    op: int
    index: int
    spec: Spec
    """Spec to which the value is constrained."""
    operand: tuple[int, int] | None = None
    name: str = ""
    """Source name of the op, for readers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """An opaque call, or a top-k, that every device runs on its shards."""

    op: int
    """Number of the op, as in `Pin`."""
    name: str
    """Name of the call, for readers."""
    operands: tuple[Spec, ...]
    """Spec of each operand, of which every device passes its shard to the call."""
    results: tuple[Spec, ...]
    """Spec of each result, of which every device's call returns its shard."""
    summed: tuple[str, ...] = ()
    """Mesh axes over which results are summed, or gathered and combined."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unruled:
    """Ops of one kind that every device repeats whole, since no rule tells how to split them."""

    kind: str
    """Kind of op, or target of a custom call."""
    custom_call: bool
    """True if `kind` is the target of a custom call."""
    count: int
    """Number of ops in the program; an op in a loop counts once."""
    seconds: float
    """Seconds that these ops take of the predicted step."""
    share: float
    """Share of the predicted step that these ops take."""
    example: str
    """Source name of the slowest of these ops; may be empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unsure:
    """Ops of one class for which the predicted time or memory of the step is less sure than usual."""

    ops: str
    """Name of the class, in the plural."""
    time_share: float
    """Share of the predicted step that these ops take."""
    memory_share: float
    """Share of the predicted peak that tensors hold which these ops read or write."""
    time_within: float | None
    """Factor within which nine of ten compiled programs with such ops took the predicted time; None if unmeasured."""
    memory_within: float | None
    """Factor within which nine of ten reserved the predicted memory; None if unmeasured."""
    programs: int
    """Number of these compiled programs."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimeError:
    """Interval in which four of five measured steps lie, as shares of the predicted step (`known_runs`)."""

    low: float
    """Lower end: -0.08 for a step that takes 8 % less than predicted."""
    high: float
    """Upper end, alike."""
    runs: int
    """Number of measured runs like the planned one, from which the interval is made."""
    ratio: float
    """Share of the longer of two predicted steps of one model by which their difference may be wrong."""

    def __str__(self) -> str:
        """Return the interval as reports show it after a time: `-8 % to +25 %, from 31 runs like it`."""
        return f"{100 * self.low:+.0f} % to {100 * self.high:+.0f} %, from {self.runs} runs like it"


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """One op that devices compute shard by shard, instead of XLA's partitioner.

    The op is a windowed op (a convolution, a pool) that is split in space, whose shards exchange halos. Or it is a
    grouped convolution, which the partitioner computes wrongly, or an FFT, which the partitioner gathers.

    `op` counts as in `Pin`. The specs are those of its operands and results inside the region. Each device has a part
    of a sum over the axes `summed`.
    """

    op: int
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    summed: tuple[str, ...]
    name: str = ""


WAITS_FOR_HOST = "waiting for host memory"
"""Name of a span in which a block has finished its compute and waits for transfers to or from its host."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One piece of work in the predicted step; in a loop, that of all trips together."""

    name: str
    """Name of the work, for readers."""
    lane: str
    """Lane of the work: `compute`, `exposed` (communication that compute waits for), or the link of hidden
    communication.
    """
    start_s: float
    """Seconds from the start of the step to the beginning of the work."""
    seconds: float
    block: int
    """Loop that contains the work, -1 for none. Spans on a link may overlap if they belong to several blocks."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldTensors:
    """Buffers of one name that are live on one device from one stored moment to another."""

    name: str
    """Name of the argument or of the op that computes the tensor; `*` stands for the numbers of repeated layers."""
    kind: str
    """Kind of memory, one of those of `Prediction.memory`."""
    count: int
    """Number of buffers with this name."""
    bytes: int
    """Bytes of these buffers together, on one device."""
    first: int
    """Position in `Timeline.moments_s` of the first moment at which the buffers are live."""
    last: int
    """Position of the last such moment."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """One way to run the step in its predicted time, with the memory of one device over that time."""

    end_s: float
    """Seconds from the start of the step to its end."""
    spans: tuple[Span, ...]
    """Pieces of work on all lanes."""
    moments_s: tuple[float, ...]
    """Seconds from the start of the step to each moment, in program order; several moments may have one time."""
    memory: dict[str, tuple[int, ...]]
    """Bytes by kind, as in `Prediction.memory`, at each of `moments_s`."""
    held: tuple[HeldTensors, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Buffers in this memory, the largest first; small tensors are left out. The field is absent from a plan's file if
    unknown.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledStep:
    """Figures of the program that a compiler made under the plan."""

    verdict: str
    """The compiler's verdict on the fit, in words."""
    fits: bool
    """True if the compiled program fits into the memory of a device."""
    peak_bytes: int | None
    """Bytes of one device at the peak, or the bytes needed if it does not fit; None if unknown."""
    reserved_bytes: int | None
    """Bytes of one device that the program reserves from its start to its end; None if it does not fit."""
    step_time_s: float | None
    """Seconds of the step, estimated from the compiler's schedule; None, as `error` is, if it does not fit."""
    error: float | None
    """Share by which that estimate may be wrong."""
    undecided: bool
    """True if the estimate and the predicted step differ by less than that error."""
    followed: bool
    """False if unforeseen collectives send far more than the plan."""
    wire_bytes: dict[str, int]
    """Bytes that one device sends in a step, by mesh axis."""
    notes: tuple[str, ...]
    """Sentences on unforeseen collectives, and the warnings of the compilation."""


UNSOLVED = "not solved"
"""Beginning of the verdict on a mesh that was not solved, as it has too many pairs or too little to save."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshTried:
    """One mesh that the search considered."""

    mesh: str
    """Mesh as `--mesh` accepts it, the major axis first."""
    layout: str
    """Physical axes that each mesh axis is made of."""
    step_time_s: float | None
    """Step time in seconds of the best plan on the mesh; None if none was found or searched."""
    bound_s: float | None
    """Lower bound in seconds of all plans on the mesh; None if not computed."""
    verdict: str
    """`chosen`, or the reason for which the mesh was not chosen."""

    @property
    def unsolved(self) -> bool:
        """True for a mesh that was not solved, of which only the bound is known."""
        return self.verdict.startswith(UNSOLVED)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedOp:
    """Work of the ops of one name in one step on one device, in loops in all trips together.

    Ops are joined if their name, kind, source line, parameter and `bound` agree, apart from the numbers of layers.
    """

    name: str
    """Source name of the op, or of the copied tensor; empty for the rest of many small ops."""
    kind: str
    """Kind of op, or target of a custom call; `copy` for a copy that belongs to no op."""
    line: str
    """Source line of the op, such as `model.py:12`; empty if unknown."""
    parameter: str
    """Parameter that a heavy op consumes or computes the gradient of; empty if there is none."""
    times: int
    """Number of executions of these ops in one step."""
    compute_s: float
    """Seconds of compute; the memory traffic of a fusion counts at its last op."""
    host_s: float
    """Seconds of traffic to and from the host's memory, which overlaps with compute."""
    sent_s: float
    """Seconds of all communication that reshards operands, sums partial results or reshards results."""
    waited_s: float
    """Part of `sent_s` that compute waits for."""
    flops: float
    """FLOPs of the matrix unit."""
    moved_bytes: float
    """Bytes read from and written to main memory."""
    wire_bytes: int
    """Bytes that the device sends."""
    bound: str
    """Resource that takes most time: `compute`, `memory`, `network`, `overhead` (of starting ops) or `host`."""
    scores: tuple[int, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Queries, keys and head size of one head's attention, and the scores of one step of a kernel's grid (0 without a
    kernel). Empty for ops that are no kernel of attention, and neither compute nor pass over scores in memory.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterUse:
    """Shapes and planned specs of one op that consumes a parameter of a torch module."""

    parameter: str
    """Name of the parameter; a stack of layers has one use for all layers."""
    weight: Spec
    """Spec in which the op consumes the parameter, over the dims of one layer."""
    input_shape: tuple[int, ...]
    """Shape of the op's other operand."""
    input: Spec
    """Spec in which the op consumes that operand."""
    output_shape: tuple[int, ...]
    """Shape of the op's result."""
    output: Spec
    """Planned spec of the op's result."""


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """Planned spec of all results that one torch function gives in one shape, in the forward pass."""

    function: str
    """Name of the function without its namespace: `add`, `layer_norm`, `transpose`."""
    shape: tuple[int, ...]
    spec: Spec
