"""The answer: a sharding for every tensor, what is predicted of it, and where it came from."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoshard.base.providers import Runner, Viewer, provider
from autoshard.base.units import format_seconds
from autoshard.errors import UserError
from autoshard.planning.record.plan_origin import Origin, RecipeChoice, Source, read_origin
from autoshard.planning.record.plan_parts import (
    Activation,
    Call,
    MeshTried,
    ParameterUse,
    Pin,
    PlannedOp,
    Prediction,
    Region,
    Timeline,
    Unruled,
)
from autoshard.planning.record.planned_stages import PlannedPipeline
from autoshard.planning.record.spec import Spec, mesh_words, original_mesh


if TYPE_CHECKING:
    from autoshard.program import Program

SCHEMA = 1


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
    host: tuple[str, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Arguments and results that are in the hosts' memory; not in a plan's file where there are none."""
    pipeline: PlannedPipeline | None = dataclasses.field(default=None, metadata={"absent": None})
    """The stages that the step is computed in; not in a plan's file where there are none."""
    ops: tuple[PlannedOp, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Where the step's time goes, op by op, the longest first; not in files of plans that do not know it."""
    uses: tuple[ParameterUse, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """How a torch module's layers use their parameters: what `distribute` pins; not in files of other plans."""
    activations: tuple[Activation, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Values between a torch module's layers, which `distribute` pins as well; not in files of other plans."""
    axis_roles: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, metadata={"absent": {}})
    """Axis -> dim groups that it splits in most activations (`batch`, `heads`, `experts`, …), and exchanges of
    attentions whose sequence it splits (`ring`, …); empty in files of older plans."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; see `save_plan`."""
        provider("save")(self, path)

    def jit(
        self, fn: "Callable[..., Any] | Program", *, donate_argnums: int | Sequence[int] | None = None
    ) -> Callable[..., Any]:
        """`fn` as one compiled step under this plan, on the devices present; pytrees and donation are kept.

        Of a program it is the step. Arguments are moved to their planned shardings. `donate_argnums` is by default what
        `fn` donates if it is a program or a `jax.jit` function already, else nothing. The step cannot be
        differentiated: plan the whole training step. Raises `UserError` when called with another program than the one
        planned, naming the argument that differs.
        """
        return self._runner().jit(fn, donate_argnums)

    def lower(
        self, fn: "Callable[..., Any] | Program", *args: Any, donate_argnums: int | Sequence[int] | None = None
    ) -> Any:
        """`jax.stages.Lowered` of `fn` under this plan, its pins inserted; `args` are arrays or shapes."""
        return self._runner().lower(fn, args, donate_argnums)

    def __repr__(self) -> str:
        """Return one line: the program, the verdict, the predicted step time and the mesh."""
        verdict = "fits" if self.prediction.fits else "does not fit"
        time = format_seconds(self.prediction.step_time_s)
        return f"<Plan of {self.program_name}: {verdict}, {time} a step on {mesh_words(self.mesh)} of {self.topology}>"

    @property
    def origin(self) -> Origin:
        """Facts about how the plan was made, read from `provenance`."""
        return read_origin(self.provenance)

    @property
    def source(self) -> Source | None:
        """Place of the plan's program and its options; None for a program made in Python."""
        return self.origin.source

    @property
    def recipe(self) -> RecipeChoice | None:
        """Recipe that the planner chose, with those that it considered; None where none was left to it."""
        return self.origin.recipe

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags that the step is to run with."""
        return self.origin.flags

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of all devices together; None for a program that does not count tokens."""
        tokens, step = self.origin.tokens, self.prediction.step_time_s
        return tokens / step if tokens and step > 0 else None

    def is_weight(self, name: str) -> bool:
        """Return True if the argument `name` is a weight of the model, trained or frozen."""
        return self.roles[name] in ("parameter", "frozen")

    @property
    def original_mesh(self) -> dict[str, int]:
        """The mesh as it was asked for; `mesh` may have two axes in place of one of these, see `mesh_words`."""
        return original_mesh(self.mesh)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """One `jax.sharding.NamedSharding` for every flat argument, in order, on the devices present."""
        return self._runner().in_shardings()

    @property
    def out_shardings(self) -> tuple[Any, ...]:
        """One `jax.sharding.NamedSharding` for every flat result, in order, on the devices present."""
        return self._runner().out_shardings()

    def explain(self, name: str, program: Any = None) -> Any:
        """Why argument or result `name` has its spec: an `Explanation`, with what every other spec would cost.

        The program is opened again where it came from (a file, `hf:CONFIG`); pass it if the plan was made of a
        `Program`. See `explain_plan`.
        """
        return provider("explain")(self, name, program)

    def graph(self, program: Any = None) -> Any:
        """The ops of the program and the tensors between them with this plan's specs, seconds and collectives.

        A `ProgramGraph`, for networkx by its `to_networkx()`. The program is opened again where it came from (a file,
        `hf:CONFIG`); pass it if the plan was made of a `Program`. Raises `UserError` as `Program.graph` does.
        """
        return provider("graph")(program, self)

    def shard_batch(self, batch: Any) -> Any:
        """A pytree of host arrays, each as a `jax.Array` split as planned; a device is sent its own part only.

        The leaves are the plan's batch arguments, in order. With several processes each gives the whole batch.
        Raises `UserError` for a batch of other shapes.
        """
        return self._runner().shard_batch(batch)

    def load_batches(self, batches: Iterable[Any], ahead: int = 2) -> Iterator[Any]:
        """An iterator of `shard_batch` of every batch that has `ahead` of them sent or on their way.

        Raises `UserError` for a batch of other shapes, when it is reached, and for `ahead` below 1.
        """
        return self._runner().load_batches(batches, ahead)

    def load_weights(self, path: str | os.PathLike[str], program: Any) -> dict[str, Any]:
        """The parameters of a step from safetensors files of the model: a dict for the step's first argument.

        `path` is a file, or a folder such as transformers' `save_pretrained` writes, with its tensors as transformers'
        own code of the model has them; `program` is what was planned, of `hf:CONFIG` or a torch module. Every device
        gets its own part in the planned dtype, and of each tensor a process reads no more than its devices hold: layers
        that the program stacks are read one by one. Raises `UserError` for files that lack a tensor or have it in
        another shape, before anything is read.
        """
        return self._runner().load_weights(path, program)

    def save_weights(self, params: Mapping[str, Any], folder: str | os.PathLike[str], program: Any) -> Any:
        """Write parameters of the planned step as safetensors files that transformers reads; returns their paths.

        Whole tensors are gathered one by one into files of 2 GiB, with an index where there are several; a folder that
        is there must be empty, and nothing half written is left. Raises `UserError` for other parameters than the
        program's, and for those that other processes hold.
        """
        return self._runner().save_weights(params, folder, program)

    def mark(self, model: Any) -> Any:
        """Put a torch module's parameters on the XLA devices, split as planned; returns the module.

        SPMD mode must be on. The module may be on the host, or on the meta device: then its modules'
        `reset_parameters` make the values, one module at a time, so that the whole never exists anywhere.
        """
        return self._runner().torch().mark(model)

    def xla_mesh(self) -> Any:
        """`torch_xla.distributed.spmd.Mesh` of the plan."""
        return self._runner().torch().xla_mesh()

    @property
    def input_sharding(self) -> Any:
        """For torch_xla's `MpDeviceLoader(input_sharding=...)`: one `ShardingSpec`, or a dict by name of the input."""
        return self._runner().torch().input_sharding()

    def placements(self, model: Any, mesh: Any) -> dict[str, Any]:
        """DTensor placements (`Shard`, `Replicate`) of every parameter of a torch module on a `DeviceMesh`."""
        return self._runner().torch().placements(model, mesh)

    def distribute(self, model: Any, mesh: Any, *, gather_outputs: bool = False) -> Any:
        """Have a torch module train or infer under this plan on a `DeviceMesh` of any backend; returns the module.

        Every parameter becomes a DTensor that is split as planned. From then on the module takes its inputs as plain
        tensors, the whole batch on every process, or as DTensors, and splits them as planned; its layers take their
        parameters and give their values in the plan's specs. What DTensor cannot run every device runs whole;
        `autoshard.exec.distribution_notes(model)` says what that was. The module gives DTensors with no sums left
        over, or whole plain tensors with `gather_outputs`. Make optimizers afterwards, and seed all processes alike.

        Raises `UserError` for a mesh of other axes than the plan's, for another module's parameters, and for a module
        that is distributed already.
        """
        return self._runner().torch().distribute(model, mesh, gather_outputs)

    def to_frame(self) -> Any:
        """`pandas.DataFrame` with a row for each argument: role, shape, spec, bytes of the whole and of one device."""
        return self._viewer().to_frame()

    def plot_time(self) -> Any:
        """`matplotlib` figure of the step time's parts, the baselines below the plan."""
        return self._viewer().plot_time()

    def plot_memory(self) -> Any:
        """`matplotlib` figure of what fills one device at the peak."""
        return self._viewer().plot_memory()

    def plot_sharding(self, name: str) -> Any:
        """`matplotlib` figure of the devices, coloured by the part of argument `name` that they hold."""
        return self._viewer().plot_sharding(name)

    def _repr_html_(self) -> str:
        return self._viewer().html()

    @property
    def by_stage(self) -> bool:
        """Whether it is for a runtime with a program for each stage, and so for no single step."""
        return self.pipeline is not None and not self.pipeline.together

    def check_one_step(self) -> None:
        """Raises `UserError` for a plan that is no single step, so cannot be run, compiled or priced again as one."""
        if self.by_stage:
            raise UserError(
                f"the plan of {self.program_name} is a program for each stage, and no single step: export it with "
                "`autoshard export --to torch-pipelining`."
            )

    def _runner(self) -> Runner:
        self.check_one_step()
        return provider("run")(self)

    def _viewer(self) -> Viewer:
        return provider("view")(self)
