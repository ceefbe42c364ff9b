"""The answer: specs, predictions and where they came from; saved as JSON."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from autoshard.plan._spec import Spec, original_mesh


SCHEMA = 1


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

    @property
    def expected_s(self) -> float:
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
    """Of the predicted step."""
    share: float
    """Of the predicted step."""
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
class Timeline:
    """One way to run the step in its predicted time, and the memory of one device meanwhile."""

    end_s: float
    spans: tuple[Span, ...]
    moments_s: tuple[float, ...]
    """In program order; several moments may have one time."""
    memory: dict[str, tuple[int, ...]]
    """Bytes by kind at every moment."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshTried:
    """One mesh that the search for the best one looked at."""

    mesh: str
    """As `--mesh` takes it, major first."""
    layout: str
    """The physical axes that each axis is made of."""
    step_time_s: float | None
    """Of the best plan found on it; None where none was, or none was looked for."""
    bound_s: float | None
    """No plan on it takes less; None if that was not computed."""
    verdict: str
    """Whether it was chosen, or why not."""


class Executor(Protocol):
    """What can run a plan. This room knows the interface only; `exec` implements it and says so (`set_executor`)."""

    def jit(self, fn: Callable[..., Any], donate_argnums: int | Sequence[int] | None) -> Callable[..., Any]: ...
    def lower(self, fn: Callable[..., Any], args: Sequence[Any], donate_argnums: int | Sequence[int] | None) -> Any: ...
    def in_shardings(self) -> tuple[Any, ...]: ...
    def out_shardings(self) -> tuple[Any, ...]: ...
    def shard_batch(self, batch: Any) -> Any: ...
    def load_batches(self, batches: Iterable[Any], ahead: int) -> Iterator[Any]: ...
    def torch(self) -> Any: ...


_make_executor: list[Callable[["Plan"], Executor]] = []


def set_executor(make: Callable[["Plan"], Executor]) -> None:
    """Name who runs plans; called once, by the room that does."""
    _make_executor[:] = [make]


def _executor(plan: "Plan") -> Executor:
    if not _make_executor:
        import autoshard

        _ = autoshard.exec  # the package loads the room, which calls `set_executor`
    return _make_executor[0](plan)


class Viewer(Protocol):
    """What can show a plan in a notebook; `report` implements it and says so (`set_viewer`)."""

    def to_frame(self) -> Any: ...
    def html(self) -> str: ...
    def plot_time(self) -> Any: ...
    def plot_memory(self) -> Any: ...
    def plot_sharding(self, name: str) -> Any: ...


_make_viewer: list[Callable[["Plan"], Viewer]] = []


def set_viewer(make: Callable[["Plan"], Viewer]) -> None:
    """Name who shows plans; called once, by the room that does."""
    _make_viewer[:] = [make]


def _viewer(plan: "Plan") -> Viewer:
    if not _make_viewer:
        import autoshard

        _ = autoshard.report  # the package loads the room, which calls `set_viewer`
    return _make_viewer[0](plan)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A sharding for every argument, result and chosen intermediate of one program on one mesh."""

    program_name: str
    program_fingerprint: str
    topology: str
    mesh: dict[str, int]
    """Axis names and sizes, major first; `model(8 of 16)` is a part of a refined axis."""
    device_order: tuple[int, ...]
    """Device ids (positions in the topology's own order) laid out row-major over the mesh."""
    memory_limit_bytes: int
    arguments: dict[str, Spec]
    results: dict[str, Spec]
    pins: tuple[Pin, ...]
    prediction: Prediction
    baselines: dict[str, Prediction]
    objective: int
    """Picoseconds, of the Problem that was solved."""
    lower_bound: int
    solver_gap: float
    plan_gap: float
    words: tuple[str, ...]
    """The plan in words, by dim group."""
    warnings: tuple[str, ...]
    provenance: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Shape of every argument by name."""
    dtypes: dict[str, str]
    roles: dict[str, str]
    module_hash: str = ""
    """`graph.structure_hash` of the program's inlined module: pins are positions in it. Empty if there are no pins."""
    timeline: Timeline | None = None
    """None in a plan that was saved before there were timelines."""
    calls: tuple[Call, ...] = ()
    """Opaque calls with a rule; what is missing here every device makes whole."""
    unruled: tuple[Unruled, ...] = ()
    """What has no sharding rule, the largest share of the step first."""
    choices: str = ""
    """The alternative taken at every decision, in order: what `explain` starts from."""
    regions: tuple[Region, ...] = ()
    """Ops that run shard by shard, by regions of the plan's own."""
    meshes: tuple[MeshTried, ...] = ()
    """Every mesh that was considered, the chosen one first, then by time; empty where the mesh was given."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; see `save_plan`."""
        from autoshard.plan._store import save_plan

        save_plan(self, path)

    def jit(self, fn: Callable[..., Any], *, donate_argnums: int | Sequence[int] | None = None) -> Callable[..., Any]:
        """`fn` as one compiled step under this plan, on the devices present; pytrees and donation are kept.

        Arguments are moved to their planned shardings. `donate_argnums` is by default what `fn` donates if it is
        a `jax.jit` function already, else nothing. The step cannot be differentiated: plan the whole training step.
        Raises `UserError` when called with another program than the one planned, naming the argument that differs.
        """
        return _executor(self).jit(fn, donate_argnums)

    def lower(self, fn: Callable[..., Any], *args: Any, donate_argnums: int | Sequence[int] | None = None) -> Any:
        """`jax.stages.Lowered` of `fn` under this plan, its pins inserted; `args` are arrays or shapes."""
        return _executor(self).lower(fn, args, donate_argnums)

    @property
    def original_mesh(self) -> dict[str, int]:
        """The mesh as it was asked for; `mesh` may have two axes in place of one of these, see `mesh_words`."""
        return original_mesh(self.mesh)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """One `jax.sharding.NamedSharding` for every flat argument, in order, on the devices present."""
        return _executor(self).in_shardings()

    @property
    def out_shardings(self) -> tuple[Any, ...]:
        """One `jax.sharding.NamedSharding` for every flat result, in order, on the devices present."""
        return _executor(self).out_shardings()

    def explain(self, name: str, program: Any = None) -> Any:
        """Why argument or result `name` has its spec: an `Explanation`, with what every other spec would cost.

        The program is opened again where it came from (a file, `hf:CONFIG`); pass it if the plan was made of a
        `Program`. See `explain_plan`.
        """
        from autoshard.plan._explain import explain_plan

        return explain_plan(self, name, program)

    def graph(self, program: Any = None) -> Any:
        """The ops of the program and the tensors between them with this plan's specs, seconds and collectives.

        A `ProgramGraph`, for networkx by its `to_networkx()`. The program is opened again where it came from (a file,
        `hf:CONFIG`); pass it if the plan was made of a `Program`. Raises `UserError` as `Program.graph` does.
        """
        from autoshard.plan._explain import reopen
        from autoshard.plan._program_graph import program_graph

        return program_graph(program or reopen(self), self)

    def shard_batch(self, batch: Any) -> Any:
        """A pytree of host arrays, each as a `jax.Array` split as planned; a device is sent its own part only.

        The leaves are the plan's batch arguments, in order. With several processes each gives the whole batch.
        Raises `UserError` for a batch of other shapes.
        """
        return _executor(self).shard_batch(batch)

    def load_batches(self, batches: Iterable[Any], ahead: int = 2) -> Iterator[Any]:
        """An iterator of `shard_batch` of every batch that has `ahead` of them sent or on their way.

        Raises `UserError` for a batch of other shapes, when it is reached, and for `ahead` below 1.
        """
        return _executor(self).load_batches(batches, ahead)

    def mark(self, model: Any) -> Any:
        """Put a torch module's parameters on the XLA devices, split as planned; returns the module.

        SPMD mode must be on. The module may be on the host, or on the meta device: then its modules'
        `reset_parameters` make the values, one module at a time, so that the whole never exists anywhere.
        """
        return _executor(self).torch().mark(model)

    def xla_mesh(self) -> Any:
        """`torch_xla.distributed.spmd.Mesh` of the plan."""
        return _executor(self).torch().xla_mesh()

    @property
    def input_sharding(self) -> Any:
        """For torch_xla's `MpDeviceLoader(input_sharding=...)`: one `ShardingSpec`, or a dict by name of the input."""
        return _executor(self).torch().input_sharding()

    def placements(self, model: Any, mesh: Any) -> dict[str, Any]:
        """DTensor placements (`Shard`, `Replicate`) of every parameter of a torch module on a `DeviceMesh`."""
        return _executor(self).torch().placements(model, mesh)

    def distribute(self, model: Any, mesh: Any) -> Any:
        """Make every parameter of a torch module a DTensor on a `DeviceMesh`, split as planned; returns the module."""
        return _executor(self).torch().distribute(model, mesh)

    def to_frame(self) -> Any:
        """`pandas.DataFrame` with a row for each argument: role, shape, spec, bytes of the whole and of one device."""
        return _viewer(self).to_frame()

    def plot_time(self) -> Any:
        """`matplotlib` figure of the step time's parts, the baselines below the plan."""
        return _viewer(self).plot_time()

    def plot_memory(self) -> Any:
        """`matplotlib` figure of what fills one device at the peak."""
        return _viewer(self).plot_memory()

    def plot_sharding(self, name: str) -> Any:
        """`matplotlib` figure of the devices, coloured by the part of argument `name` that they hold."""
        return _viewer(self).plot_sharding(name)

    def _repr_html_(self) -> str:
        return _viewer(self).html()
