"""The planner's answer: a sharding for every tensor, its prediction and its provenance."""

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
    CompiledStep,
    MeshTried,
    ParameterUse,
    Pin,
    PlannedOp,
    Prediction,
    Region,
    TimeError,
    Timeline,
    Unruled,
    Unsure,
)
from autoshard.planning.record.planned_stages import FORM_BY_STAGE, PlannedPipeline
from autoshard.planning.record.spec import Spec, mesh_words, original_mesh


if TYPE_CHECKING:
    from autoshard.program import Program

SCHEMA = 1
"""Version of the format of plans' files."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A sharding for every argument, result and chosen intermediate of one program on one mesh.

    Methods that run, lower or load need a plan of one step; they raise `UserError` if `by_stage` is True.
    """

    program_name: str
    program_fingerprint: str
    """Hash of the planned program, with which a program is recognised as the planned one."""
    topology: str
    """Topology as `--topology` accepts it, such as `v5p:4x8x8`."""
    mesh: dict[str, int]
    """Axis names and sizes, major first; `model(8 of 16)` is a part of a refined axis."""
    device_order: tuple[int, ...]
    """Device ids (positions in the topology's own order) laid out row-major over the mesh."""
    memory_limit_bytes: int
    """Bytes of one device that the plan may use."""
    arguments: dict[str, Spec]
    """Spec of every flat argument by name, in order."""
    results: dict[str, Spec]
    """Spec of every flat result by name, in order."""
    pins: tuple[Pin, ...]
    """Intermediate values to constrain, as propagation from arguments and results would not find their specs."""
    prediction: Prediction
    """Prediction of the plan itself."""
    baselines: dict[str, Prediction]
    """Prediction of every baseline by name."""
    objective: int
    """Cost of the solved Problem in picoseconds."""
    lower_bound: int
    """Bound in picoseconds below which no solution of that Problem costs."""
    solver_gap: float
    """Distance of `objective` from the Problem's bound, as a fraction of `objective`; 0 if the solution is optimal."""
    plan_gap: float
    """Distance of the plan's predicted time from the certified bound for the mesh, as a fraction of that time."""
    words: tuple[str, ...]
    """Description of the plan in words, by dim group."""
    warnings: tuple[str, ...]
    """Sentences for the user on limits of the plan or of its prediction."""
    provenance: dict[str, Any]
    """Facts about how the plan was made, as JSON values; `origin` reads them."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of every argument by name."""
    dtypes: dict[str, str]
    """Dtype of every argument by name."""
    roles: dict[str, str]
    """Role of every argument by name: `parameter`, `frozen`, `optimizer_state`, `batch` or `other`."""
    module_hash: str = ""
    """`graph.structure_hash` of the program's inlined module, in which pins are positions. Empty if there are no
    pins.
    """
    timeline: Timeline | None = None
    """Timeline of the step; None in plans saved before the field existed."""
    calls: tuple[Call, ...] = ()
    """Opaque calls with a sharding rule; every device runs all other calls whole."""
    unruled: tuple[Unruled, ...] = ()
    """Ops without a sharding rule, the largest share of the step first."""
    choices: str = ""
    """Chosen alternative of every decision, in order, from which `explain` starts."""
    regions: tuple[Region, ...] = ()
    """Ops that run shard by shard, in regions of the plan's own."""
    meshes: tuple[MeshTried, ...] = ()
    """Meshes that the search considered, the chosen one first, then by time; empty if the user gave the mesh."""
    host: tuple[str, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Arguments and results in the hosts' memory; absent from a plan's file if there are none."""
    donated: tuple[str, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Arguments whose memory the results reuse in the predicted peak; absent from a plan's file if there are none."""
    pipeline: PlannedPipeline | None = dataclasses.field(default=None, metadata={"absent": None})
    """Pipeline stages of the step; absent from a plan's file if there are none."""
    ops: tuple[PlannedOp, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Time of the step op by op, the longest first; absent from files of plans without it."""
    uses: tuple[ParameterUse, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Uses of a torch module's parameters by its layers, which `distribute` pins; absent from files of other plans."""
    activations: tuple[Activation, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Values between a torch module's layers, which `distribute` pins as well; absent from files of other plans."""
    unsure: tuple[Unsure, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Classes of ops that make the prediction less sure than usual; absent from a plan's file if there are none."""
    time_error: TimeError | None = dataclasses.field(default=None, metadata={"absent": None})
    """Error of the predicted step in measured runs like it; None, and absent from a plan's file, if none is known."""
    axis_roles: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, metadata={"absent": {}})
    """Axis -> dim groups that the axis splits in most activations, such as `batch`, `heads` or `experts`.

    Exchanges of attentions whose sequence the axis splits follow, such as `ring`. Files of older plans have none.
    """
    compiled: CompiledStep | None = dataclasses.field(default=None, metadata={"absent": None})
    """Figures of the compiled step; None, and absent from a plan's file, if `plan --compile` did not make it."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON to a file, which is replaced if it exists; raise `UserError` if that is impossible."""
        provider("save")(self, path)

    def jit(self, fn: "Callable[..., Any] | Program", *, donate_argnums: int | Sequence[int] | None = None) -> Any:
        """Return `fn` as one compiled step under this plan on the present devices, with the same pytrees.

        - `fn`: the planned function, or the planned program for its step.
        - `donate_argnums`: arguments to donate. By default a program or a `jax.jit` function donates its own. A
          function that donates none donates what was planned so, as by `autoshard.trace(..., donate_argnums=...)`.

        The step moves its arguments to their planned shardings. The step cannot be differentiated: plan the whole
        training step. Raises `UserError` when called with another program than the planned one, and names the argument
        that differs.
        """
        if self.by_stage and not self.origin.form:
            return provider("run")(self).jit(fn, donate_argnums)
        return self._runner().jit(fn, donate_argnums)

    def lower(
        self, fn: "Callable[..., Any] | Program", *args: Any, donate_argnums: int | Sequence[int] | None = None
    ) -> Any:
        """Return `jax.stages.Lowered` of `fn` under this plan, with its pins inserted.

        - `fn`, `donate_argnums`: as for `jit`.
        - `args`: positional arguments of `fn`, as arrays or shapes.
        """
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
        """Recipe that the planner chose, with those that it considered; None if all was given."""
        return self.origin.recipe

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags that the step is to run with."""
        return self.origin.flags

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of all devices together; None for a program that does not count tokens, or takes no time."""
        tokens, step = self.origin.tokens, self.prediction.step_time_s
        return tokens / step if tokens and step > 0 else None

    @property
    def time_within(self) -> float | None:
        """Factor within which the predicted step is expected, if that is less sure than usual; None if unmeasured."""
        return max((each.time_within or 0.0 for each in self.unsure), default=0.0) or None

    @property
    def time_error_words(self) -> str:
        """Error of the predicted step as reports show it after the time."""
        if self.time_within is not None:
            return f"within a factor {self.time_within:.1f}"
        return str(self.time_error) if self.time_error else "no run like this one is known"

    @property
    def memory_within(self) -> float | None:
        """Factor within which the predicted memory is expected, as `time_within`."""
        return max((each.memory_within or 0.0 for each in self.unsure), default=0.0) or None

    def is_weight(self, name: str) -> bool:
        """Return True if argument `name` is a weight of the model, trained or frozen; raise `KeyError` if unknown."""
        return self.roles[name] in ("parameter", "frozen")

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch of most activations; empty for files of older plans."""
        return tuple(axis for axis in self.mesh if "batch" in self.axis_roles.get(axis, ()))

    @property
    def original_mesh(self) -> dict[str, int]:
        """The mesh as the user requested it; `mesh` may have two axes in place of one of these, see `mesh_words`."""
        return original_mesh(self.mesh)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """One `jax.sharding.NamedSharding` for every flat argument, in order, on the present devices."""
        return self._runner().in_shardings()

    @property
    def out_shardings(self) -> tuple[Any, ...]:
        """One `jax.sharding.NamedSharding` for every flat result, in order, on the present devices."""
        return self._runner().out_shardings()

    def explain(self, name: str, program: Any = None, *, solve: bool = False) -> Any:
        """Explain why argument or result `name` has its spec: an `Explanation` with the cost of every other spec.

        All other decisions are fixed; with `solve` they are solved again for the most promising specs. The program is
        opened again from its source (a file, `hf:CONFIG`). Pass `program` if the plan was made from a `Program`. See
        `explain_plan`.
        """
        return provider("explain")(self, name, program, solve=solve)

    def graph(self, program: Any = None) -> Any:
        """Return the ops of the program and the tensors between them, with this plan's specs, seconds and collectives.

        The result is a `ProgramGraph`; its `to_networkx()` gives a graph for networkx. The program is opened again from
        its source (a file, `hf:CONFIG`). Pass `program` if the plan was made from a `Program`. Raises `UserError` as
        `Program.graph` does.
        """
        return provider("graph")(program, self)

    def shard_batch(self, batch: Any) -> Any:
        """Shard a pytree of host arrays: each becomes a `jax.Array` split as planned, and a device receives its own
        part only.

        The leaves are the plan's batch arguments, in order. With several processes each passes the whole batch. Raises
        `UserError` for a batch of other shapes.
        """
        return self._runner().shard_batch(batch)

    def load_batches(self, batches: Iterable[Any], ahead: int = 2) -> Iterator[Any]:
        """Return an iterator of `shard_batch` of every batch that sends `ahead` batches in advance.

        Raises `UserError` for `ahead` below 1, and for a batch of other shapes when the iterator reaches it.
        """
        return self._runner().load_batches(batches, ahead)

    def load_weights(self, path: str | os.PathLike[str], program: Any) -> dict[str, Any]:
        """Load the parameters of a step from a model's safetensors files, as a dict for the step's first argument.

        - `path`: a file, or a folder as transformers' `save_pretrained` writes it. Its tensors are those of
          transformers' own code of the model.
        - `program`: the planned program, of `hf:CONFIG` or a torch module.

        Every device receives its own part in the planned dtype. A process reads no more of a tensor than its devices
        store: stacked layers are read one by one. Raises `UserError` for files that lack a tensor or have it in another
        shape, before anything is read.
        """
        return self._runner().load_weights(path, program)

    def save_weights(self, params: Mapping[str, Any], folder: str | os.PathLike[str], program: Any) -> Any:
        """Write parameters of the planned step as safetensors files that transformers reads; return their paths.

        Whole tensors are gathered one by one into files of 2 GiB, with an index if there are several files. An existing
        folder must be empty, and no partial file is left after a failure. Raises `UserError` for other parameters than
        the program's, and for parameters that other processes store.
        """
        return self._runner().save_weights(params, folder, program)

    def mark(self, model: Any) -> Any:
        """Put a torch module's parameters on the XLA devices, split as planned; return the module.

        SPMD mode must be on. The module may be on the host or on the meta device. On the meta device its modules'
        `reset_parameters` compute the values, one module at a time, so that the whole module never exists in one
        memory.
        """
        return self._runner().torch().mark(model)

    def xla_mesh(self) -> Any:
        """Return the plan's `torch_xla.distributed.spmd.Mesh`."""
        return self._runner().torch().xla_mesh()

    @property
    def input_sharding(self) -> Any:
        """The value for torch_xla's `MpDeviceLoader(input_sharding=...)`: one `ShardingSpec`, or a dict by name of the
        input.
        """
        return self._runner().torch().input_sharding()

    def placements(self, model: Any, mesh: Any) -> dict[str, Any]:
        """Return the DTensor placements of every parameter of a torch module, by name.

        They are a tuple with `Shard` or `Replicate` for each mesh axis, in the mesh's order. Raises `UserError` for a
        mesh of other axes than the plan's, for another module's parameters, and for specs that DTensor lacks.

        - `model`: the planned torch module.
        - `mesh`: a `DeviceMesh`.
        """
        return self._runner().torch().placements(model, mesh)

    def distribute(self, model: Any, mesh: Any, *, gather_outputs: bool = False) -> Any:
        """Distribute a torch module under this plan on a `DeviceMesh` of any backend, for training or inference; return
        the module.

        Every parameter becomes a DTensor that is split as planned. The module then accepts its inputs as plain tensors,
        the whole batch on every process, or as DTensors, and splits them as planned. Its layers consume parameters and
        give values in the plan's specs. Ops that DTensor cannot run are run whole on every device;
        `autoshard.exec.distribution_notes(model)` lists them. The module returns DTensors without pending sums, or
        whole plain tensors with `gather_outputs`. Create optimizers afterwards, and seed all processes alike.

        Raises `UserError` for a mesh of other axes than the plan's, for another module's parameters, and for a module
        that is distributed already.
        """
        return self._runner().torch().distribute(model, mesh, gather_outputs)

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each argument: role, shape, spec, bytes of the whole and of one
        device, seconds of its collectives. Raises `UserError` without pandas.
        """
        return self._viewer().to_frame()

    def plot_time(self) -> Any:
        """Plot the parts of the step time as a `matplotlib` figure, the baselines below the plan."""
        return self._viewer().plot_time()

    def plot_memory(self) -> Any:
        """Plot the memory of one device at the peak, by kind, as a `matplotlib` figure."""
        return self._viewer().plot_memory()

    def plot_sharding(self, name: str) -> Any:
        """Plot the devices as a `matplotlib` figure, coloured by the part of argument `name` that they store.

        Raises `UserError` for a name that is no argument.
        """
        return self._viewer().plot_sharding(name)

    def _repr_html_(self) -> str:
        """Return the plan as HTML, for notebooks."""
        return self._viewer().html()

    @property
    def by_stage(self) -> bool:
        """True if the plan is for a runtime with a program for each stage, and so for no single step."""
        return self.pipeline is not None and not self.pipeline.together

    def check_one_step(self) -> None:
        """Raise `UserError` for a plan that is no single step, so cannot be run, compiled or priced again as one."""
        if self.by_stage:
            export = f"export it with `autoshard export --to {FORM_BY_STAGE}`"
            raise UserError(
                f"the plan of {self.program_name} is a program for each stage, and no single step: "
                f"{export if self.origin.form else 'run `plan.jit(step)`'}."
            )

    def _runner(self) -> Runner:
        """Return the provider `run` for this plan; raise `UserError` for a plan that is no single step."""
        self.check_one_step()
        return provider("run")(self)

    def _viewer(self) -> Viewer:
        """Return the provider `view` for this plan."""
        return provider("view")(self)
