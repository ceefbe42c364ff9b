"""Run of JAX steps as a program for each stage, each on the devices of its stage, in the order of the plan's schedule.

The trace of the step on one microbatch is split into forward and backward parts of chunks, and parts of the update. One
process dispatches all of them. JAX runs a program as soon as its operands have arrived, so stages run at the same time.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.cost import ZERO_BUBBLE
from autoshard.errors import UserError
from autoshard.exec.apply.plan_agreement import check_arguments, check_results
from autoshard.exec.apply.planned_lowering import PlacedPlan
from autoshard.exec.devices.local_devices import named_sharding
from autoshard.planning import Plan
from autoshard.program import Part, in_segments
from autoshard.program.jax.gradient_groups import Reduction, Relation
from autoshard.program.jax.step_checks import without_custom_gradients
from autoshard.program.jax.step_parts import StepPart, closed_jaxpr, split_step


class StagedStep:
    """A step of flat arrays that runs as a program for each stage."""

    def __init__(
        self, placed: PlacedPlan, fn: Callable[..., Any], args: tuple[Any, ...], donated: Sequence[bool]
    ) -> None:
        """Trace and split the step; programs are compiled at the first call.

        - `args`: pytrees of `jax.ShapeDtypeStruct` of the whole batch, one for each argument.
        - `donated`: True for each flat argument whose memory results may reuse.

        Raises `UserError` for another program than the planned one, and for a step that cannot be split.
        """
        import jax

        plan = self.plan = placed.plan
        assert plan.pipeline is not None
        if placed.mesh.is_multi_process:
            raise UserError("a JAX step runs by stage in one process, and these devices belong to several.")
        self.pipeline = plan.pipeline
        self.batch = tuple(number for number, name in enumerate(plan.arguments) if plan.roles[name] == "batch")
        leaves, tree = jax.tree.flatten(args)
        one = jax.tree.leaves(self._microbatch(leaves))
        check_arguments(plan, jax.tree_util.tree_flatten_with_path(tree.unflatten(one))[0])
        with in_segments(self.pipeline.microbatches) as segments, without_custom_gradients():
            less, out = jax.make_jaxpr(fn, return_shape=True)(*tree.unflatten(one))
        with in_segments(self.pipeline.microbatches):
            whole = jax.make_jaxpr(fn)(*args)
        check_results(plan, jax.tree.leaves(out))
        self.tree = jax.tree.structure(out)
        parameters = [number for number, name in enumerate(plan.arguments) if plan.roles[name] == "parameter"]
        chunks = _chunks(plan, segments.names)
        apart = self.pipeline.schedule == ZERO_BUBBLE
        self.split = split_step(less, whole, chunks, self.pipeline.stages, self.batch, parameters, apart)
        self.donated = {v for v, own in zip(less.jaxpr.invars, donated, strict=True) if own}
        self.meshes = _stage_meshes(placed)
        self.forward: dict[tuple[bool, bool, int], _StageProgram] = {}
        self.updates: list[_StageProgram] = []
        last_use = {v: number for number, part in enumerate(self.split.parts) for v in part.inputs}
        last_use |= dict.fromkeys((v for v in self.split.results if not hasattr(v, "val")), -1)  # returned as they are
        for number, part in enumerate(self.split.parts):
            program = self._compiled(part, {v for v in part.inputs if last_use[v] == number})
            if part.part is Part.UPDATE:
                self.updates.append(program)
            else:
                self.forward[part.part is Part.BACKWARD, part.weights, part.chunk] = program
        table = self.pipeline.timetable()
        self.order = sorted((work for row in table.rows for work in row), key=lambda work: work.start_s)

    def _microbatch(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the shapes of flat arguments with one microbatch of the batch's rows."""
        import jax

        count, batch = self.pipeline.microbatches, set(self.batch)
        return [
            jax.ShapeDtypeStruct((leaf.shape[0] // count, *leaf.shape[1:]), leaf.dtype)
            if number in batch and leaf.shape
            else leaf
            for number, leaf in enumerate(leaves)
        ]

    def _compiled(self, part: StepPart, ends: set[Any]) -> "_StageProgram":
        """Return a part as a jitted function.

        `ends` are inputs that no later part uses. The update donates them to results of their shape, if the user
        donates them. Results have the plan's specs, so updated state is placed as the argument that it replaces.
        """
        import jax
        from jax.extend.core import jaxpr_as_fun

        stage = part.chunk if part.part is Part.UPDATE else part.chunk % self.pipeline.stages
        inputs = part.inputs
        run = jaxpr_as_fun(closed_jaxpr(self.split.closed, part.equations, inputs, part.outputs))
        named = zip(self.split.results, self.plan.results.values(), strict=True)
        specs = {v: spec for v, spec in named if not hasattr(v, "val")}
        shardings = [named_sharding(self.meshes[stage], specs[v]) if v in specs else None for v in part.outputs]
        room = collections.Counter((v.aval.shape, v.aval.dtype) for v in part.outputs)
        donate = []
        updated = inputs if part.part is Part.UPDATE else ()
        for number, v in enumerate(updated):
            kind = (v.aval.shape, v.aval.dtype)
            if v in ends and v in self.donated and room[kind]:
                room[kind] -= 1
                donate.append(number)
        return _StageProgram(jax.jit(run, out_shardings=shardings, donate_argnums=donate), stage, inputs, part.outputs)

    def shardings(self) -> list[Any]:
        """Return a `NamedSharding` for every flat argument, on the devices of the stage that stores it."""
        owners = (self.split.owners[v] for v in self.split.closed.jaxpr.invars)
        specs = self.plan.arguments.values()
        return [named_sharding(self.meshes[stage], spec) for stage, spec in zip(owners, specs, strict=True)]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run one step on flat arguments and return its results, each on the devices of its stage.

        Raises `UserError` for an array that an earlier call consumed, and for one that is donated twice.
        """
        import jax

        donated: set[int] = set()
        for name, v, leaf in zip(self.plan.arguments, self.split.closed.jaxpr.invars, leaves, strict=True):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise UserError(f"`{name}` was donated to an earlier call, and is gone: pass what that call returned.")
            if v in self.donated and id(leaf) in donated:
                raise UserError(f"`{name}` is an array that is donated twice: pass a copy of it.")
            donated.update([id(leaf)] if v in self.donated else [])
        run = _Run(self, leaves)
        for work in self.order:
            if (program := self.forward.get((work.backward, work.weights, work.chunk))) is not None:
                run.microbatch(program, work.microbatch)
        run.reduce()
        for program in self.updates:
            run.once(program)
        return self.tree.unflatten([run.result(v) for v in jax.tree.leaves(self.split.results)])


@dataclasses.dataclass(frozen=True, slots=True)
class _StageProgram:
    """A jitted part with its stage, and the variables of its operands and results."""

    run: Callable[..., Any]
    stage: int
    inputs: Sequence[Any]
    outputs: Sequence[Any]


class _Run:
    """Values of one run of a step, removed after their last use."""

    def __init__(self, step: StagedStep, leaves: Sequence[Any]) -> None:
        """Place the arguments on their stages; rows of the batch wait until their microbatch begins."""
        import jax

        self.step, self.split = step, step.split
        self.values: dict[tuple[Any, int | None], Any] = {}
        """Values by variable and microbatch, None for values of the whole step."""
        self.moved: dict[tuple[Any, int | None, int], Any] = {}
        """Copies on other stages, by variable, microbatch and stage."""
        self.rows: dict[Any, Any] = {}
        self.totals: dict[Any, Any] = {}
        programs = step.forward.values()
        self.uses = collections.Counter(v for program in programs for v in program.inputs)
        self.left: dict[int, collections.Counter[Any]] = collections.defaultdict(self.uses.copy)
        variables = self.split.closed.jaxpr.invars
        for number, (v, leaf, sharding) in enumerate(zip(variables, leaves, step.shardings(), strict=True)):
            if number in step.batch:
                self.rows[v] = (leaf, sharding)
            else:
                self.values[v, None] = jax.device_put(leaf, sharding)

    def _value(self, v: Any, microbatch: int | None, stage: int) -> Any:
        """Return a value on the devices of a stage, sent there if it is elsewhere."""
        import jax

        key = (v, None if (v, None) in self.values else microbatch)
        if v in self.rows and key not in self.values:
            leaf, sharding = self.rows[v]
            assert microbatch is not None
            size = leaf.shape[0] // self.step.pipeline.microbatches if leaf.shape else 0
            own = leaf[microbatch * size : (microbatch + 1) * size] if leaf.shape else leaf
            self.values[key] = jax.device_put(own, sharding)
        value, mesh = self.values[key], self.step.meshes[stage]
        if value.sharding.device_set == set(mesh.devices.flat):
            return value
        if (*key, stage) not in self.moved:
            self.moved[(*key, stage)] = jax.device_put(value, _on(mesh, value))
        return self.moved[(*key, stage)]

    def microbatch(self, program: _StageProgram, microbatch: int) -> None:
        """Run a forward or backward part on one microbatch, and drop the values that no other part needs."""
        left = self.left[microbatch]
        results = program.run(*(self._value(v, microbatch, program.stage) for v in program.inputs))
        for v, value in zip(program.outputs, results, strict=True):
            if v in self.split.summed:
                self._add(v, value)
            if left[v]:
                self.values[v, microbatch] = value
        for v in program.inputs:
            left[v] -= 1
            if not left[v] and (v, microbatch) in self.values:
                del self.values[v, microbatch]
                for stage in range(self.step.pipeline.stages):
                    self.moved.pop((v, microbatch, stage), None)

    def _add(self, v: Any, value: Any) -> None:
        """Add a microbatch's value to the total, or to the list of rows."""
        kind = self.split.summed[v].kind
        if kind is Reduction.EACH:
            self.totals.setdefault(v, []).append(value)
        elif v not in self.totals:
            self.totals[v] = value
        elif kind is not Reduction.CONST:
            self.totals[v] = _sum()(self.totals[v], value)

    def reduce(self) -> None:
        """Turn the totals into the values of the whole batch."""
        for v, total in self.totals.items():
            relation = self.split.summed[v]
            self.values[v, None] = _whole(relation, total, self.step.pipeline.microbatches, v.aval.dtype)
        self.totals.clear()

    def once(self, program: _StageProgram) -> None:
        """Run a part of the update."""
        results = program.run(*(self._value(v, None, program.stage) for v in program.inputs))
        self.values.update(((v, None), value) for v, value in zip(program.outputs, results, strict=True))

    def result(self, v: Any) -> Any:
        """Return a result of the step, which may be an argument, a literal or a captured array."""
        import jax.numpy as jnp

        closed = self.split.closed
        if hasattr(v, "val"):
            return jnp.asarray(v.val, v.aval.dtype)
        if v in closed.jaxpr.constvars:
            return jnp.asarray(closed.consts[closed.jaxpr.constvars.index(v)])
        return self.rows[v][0] if v in self.rows else self.values[v, None]


def _whole(relation: Relation, total: Any, count: int, dtype: Any) -> Any:
    """Return the value of the batch, of a `dtype`, from the total of its `count` microbatches, or from their rows."""
    if relation.kind is Reduction.EACH:
        dim = 0 if relation.place is None else relation.place.dim
        return _joined(dim)(*total)
    divisor = count if relation.kind is Reduction.MEAN else 1
    return total if divisor == 1 and total.dtype == dtype else _part(divisor, str(dtype))(total)


@functools.cache
def _sum() -> Callable[..., Any]:
    """Return a jitted sum, in float32 of narrower floats."""
    import jax

    return jax.jit(lambda total, value: total.astype(_wide(total.dtype)) + value.astype(_wide(value.dtype)))


def _wide(dtype: Any) -> Any:
    """Return float32 for a narrower float, and any other dtype as it is."""
    import jax.numpy as jnp

    return jnp.promote_types(dtype, "float32") if jnp.issubdtype(dtype, jnp.floating) else dtype


@functools.cache
def _part(count: int, dtype: str) -> Callable[..., Any]:
    """Return a jitted quotient by `count`, in `dtype`."""
    import jax

    return jax.jit(lambda total: (total if count == 1 else total / count).astype(dtype))


@functools.cache
def _joined(dim: int) -> Callable[..., Any]:
    """Return a jitted concatenation along `dim`."""
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda *rows: jnp.concatenate(rows, dim))


def _on(mesh: Any, value: Any) -> Any:
    """Return the sharding of a value on the devices of another stage, in the same spec; whole if it has none."""
    from jax.sharding import NamedSharding, PartitionSpec

    spec = getattr(value.sharding, "spec", None)
    return NamedSharding(mesh, PartitionSpec() if spec is None else spec)


def _stage_meshes(placed: PlacedPlan) -> list[Any]:
    """Return the mesh of each stage: the plan's devices at its place along the axis of stages, with all other axes."""
    import numpy as np
    from jax.sharding import Mesh

    mesh = placed.mesh
    axis = mesh.axis_names.index("stage")
    names = tuple(name for name in mesh.axis_names if name != "stage")
    parts = np.moveaxis(mesh.devices, axis, 0)
    # A mesh has at least one axis.
    return [Mesh(part, names) if names else Mesh(part.reshape(1), ("device",)) for part in parts]


def _chunks(plan: Plan, names: Sequence[str]) -> list[int]:
    """Return the number of the chunk of each segment; raise `UserError` if the segments are not those of the plan."""
    assert plan.pipeline is not None
    begins = {chunk.modules[0]: number for number, chunk in enumerate(plan.pipeline.chunks)}
    missing = [name for chunk in plan.pipeline.chunks for name in chunk.modules if name not in names]
    if missing:
        raise UserError(
            f"the plan of {plan.program_name} cuts at segment `{missing[0]}`, which this step does not have: mark its "
            "code by autoshard.segment as it was planned."
        )
    chunks: list[int] = []
    for name in names:
        chunks.append(begins.get(name, chunks[-1] if chunks else 0))
    return chunks
