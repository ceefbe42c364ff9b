"""Application of a plan to JAX functions and batches: functions compiled once for each structure of arguments."""

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.exec.apply.calls_on_shards import explicit_mesh, in_type, on_mesh
from autoshard.exec.apply.plan_agreement import in_recipe
from autoshard.exec.apply.planned_lowering import PlacedPlan, lower_planned
from autoshard.exec.apply.staged_steps import StagedStep
from autoshard.exec.devices.local_devices import check_granted, named_sharding, place
from autoshard.exec.dtensor.torch_application import TorchPlan
from autoshard.program import Functional, PositionalCall, Program, arrays_of, by_position, functional, positions_of


@dataclasses.dataclass(frozen=True)
class Application(PlacedPlan):
    """Placed plan that JAX functions and torch modules run under; `Plan.jit` and related methods delegate to it."""

    def shard_batch(self, batch: Any) -> Any:
        """Place a batch as planned and return the same pytree of `jax.Array`; see `Plan.shard_batch`.

        Raises `UserError` if the shapes of its leaves are not those of the plan's batch, in order. Dtypes are not
        compared.
        """
        import jax

        plan = self.plan
        names = [name for name in plan.arguments if plan.roles[name] == "batch"]
        leaves, tree = jax.tree.flatten(batch)
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        if shapes != [plan.shapes[name] for name in names]:
            wanted = ", ".join(f"{name} {list(plan.shapes[name])}" for name in names) or "nothing"
            raise UserError(
                f"the batch has arrays of shapes {', '.join(str(list(shape)) for shape in shapes) or 'nothing'}; the "
                f"plan for {plan.program_name} wants {wanted}."
            )
        placed = [
            place(leaf, named_sharding(self.mesh, plan.arguments[name]))
            for leaf, name in zip(leaves, names, strict=True)
        ]
        return tree.unflatten(placed)

    def load_weights(self, path: str | os.PathLike[str], program: Program) -> dict[str, Any]:
        """Load weights from safetensors files as global arrays by parameter name, sharded as planned; see
        `Plan.load_weights`.
        """
        from autoshard.exec.apply import weight_files

        return weight_files.load_weights(self.plan, path, program, self.mesh)

    def save_weights(
        self, params: Mapping[str, Any], folder: str | os.PathLike[str], program: Program
    ) -> list[pathlib.Path]:
        """Write sharded parameters to safetensors files in `folder` and return their paths; see `Plan.save_weights`."""
        from autoshard.exec.apply import weight_files

        return weight_files.save_weights(self.plan, params, folder, program)

    def load_batches(self, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
        """Yield every batch in order, sharded by `shard_batch`; at most `ahead` placed batches wait.

        The first batch is yielded when `ahead` batches are placed, or all of fewer. Raises `UserError` for `ahead`
        below 1 at the first `next`.
        """
        if ahead < 1:
            raise UserError(f"plan.load_batches: ahead={ahead}, but at least 1 batch has to be sent.")
        sent: collections.deque[Any] = collections.deque()
        for batch in batches:
            sent.append(self.shard_batch(batch))  # returns before the data has arrived
            if len(sent) == ahead:
                yield sent.popleft()
        yield from sent

    def torch(self) -> TorchPlan:
        """Return the object that applies the plan to torch modules."""
        return TorchPlan(self.plan)

    def jit(
        self, fn: Callable[..., Any] | Program, donate_argnums: int | Sequence[int] | None = None
    ) -> "PlannedFunction":
        """Return a function of the same arguments that runs as planned; see `Plan.jit`. Compilation waits for the first
        call.

        - `donate_argnums`: positions to donate; None for those of the `Program` or of a `jax.jit` function, else of the
          plan.

        Raises `UserError` if `fn` is neither callable nor a `Program`.
        """
        return PlannedFunction(self, *_step_of(fn, donate_argnums))

    def lower(
        self,
        fn: Callable[..., Any] | Program,
        args: Sequence[Any],
        donate_argnums: int | Sequence[int] | None = None,
        module: bytes | None = None,
    ) -> Any:
        """Lower a function to a `jax.stages.Lowered` with shardings and pins; see `lower_planned`.

        - `args`: arguments by position, as arrays, numbers or `jax.ShapeDtypeStruct`s.
        - `donate_argnums`: as for `jit`.
        - `module`: serialised StableHLO module that was planned, if the caller has it.
        """
        import jax

        fn, donate_argnums = _step_of(fn, donate_argnums)
        call = by_position(fn, args)
        donate_argnums = call.donated or None if donate_argnums is None else donate_argnums
        step = functional(in_recipe(self.plan, call.fn), call.args)
        abstract = jax.tree.map(_abstract, step.args)
        return lower_planned(self, step.fn, abstract, self._donated(step.fn, abstract, donate_argnums), module)

    def _donated(
        self, fn: Callable[..., Any], abstract: tuple[Any, ...], donate_argnums: int | Sequence[int] | None
    ) -> tuple[int, ...]:
        """Return the positions to donate: `donate_argnums`, else the arguments that a `jax.jit` function donates whole,
        else those that the plan donates whole.

        An argument without arrays is not donated.
        """
        import jax

        if donate_argnums is not None:
            name = getattr(fn, "__name__", "the function")
            return positions_of("donate_argnums", donate_argnums, len(abstract), name)
        trace = getattr(fn, "trace", None)
        flags = (
            []
            if trace is None
            else [[leaf.donated for leaf in jax.tree.leaves(each)] for each in trace(*abstract).args_info[0]]
        )
        if not any(map(any, flags)):
            names = iter(self.plan.arguments)
            flags = [[next(names, "") in self.plan.donated for _ in jax.tree.leaves(each)] for each in abstract]
        return tuple(position for position, own in enumerate(flags) if own and all(own))


class PlannedFunction:
    """Function compiled under a plan, once for every structure of its arguments, and called like the original.

    A structure is the pytree with shapes, dtypes and weak types. Arguments move to the plan's shardings if they have
    others. A donated argument that already has the plan's sharding is consumed, as under `jax.jit`. Flax NNX objects
    are updated in place, as under `nnx.jit`.
    """

    def __init__(
        self, application: Application, fn: Callable[..., Any], donate_argnums: int | Sequence[int] | None
    ) -> None:
        """Store the function; nothing is compiled. `donate_argnums` are positions, None for those of a `jax.jit`
        function.
        """
        self.application = application
        self.fn = fn
        self.donate_argnums = donate_argnums
        self._compiled: dict[Any, _Compiled] = {}
        functools.update_wrapper(self, fn, updated=())

    def lower(self, *args: Any, **named: Any) -> Any:
        """Return the `jax.stages.Lowered` of the function for these arguments, with pins; nothing is cached.

        Raises `UserError` for a plan with a program for each stage.
        """
        self.application.plan.check_one_step()
        call = by_position(self.fn, args, named)
        return self.application.lower(call.fn, call.args, self._donated(call))

    def compile(self, *args: Any, **named: Any) -> Any:
        """Return the cached `jax.stages.Compiled` for these arguments (arrays or `jax.ShapeDtypeStruct`s), compiled if
        it is new.
        """
        return self._compile(by_position(self.fn, args, named))[0].step

    def shardings(self, *args: Any, **named: Any) -> tuple[Any, ...]:
        """Return pytrees of `NamedSharding` like the arguments, with which to place or load them; compiles the step if
        it is new.
        """
        return self._compile(by_position(self.fn, args, named))[0].shardings

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the step under the plan and return its results as the original function would.

        Places arguments first, and compiles for a new structure. Results have types of the arguments' explicit mesh, if
        there is one.
        """
        import jax

        call = by_position(self.fn, args, named)
        compiled, arrays = self._compile(call)
        if isinstance(compiled.step, StagedStep):
            return compiled.function.finish(call.args, compiled.step(jax.tree.leaves(arrays)))
        if self.application.mesh.is_multi_process:
            out = compiled.step(*jax.tree.map(place, arrays, compiled.shardings))
        else:
            # Within a mesh of the user's, JAX moves no array to devices in another order.
            within = not jax.sharding.get_mesh().empty
            with jax.set_mesh(self.application.mesh) if within else contextlib.nullcontext():
                out = compiled.step(*jax.device_put(arrays, compiled.shardings))
        mesh = explicit_mesh(jax.tree.leaves(arrays))
        return compiled.function.finish(call.args, out if mesh is None else on_mesh(out, mesh))

    def _donated(self, call: PositionalCall) -> int | Sequence[int] | None:
        """Return the positions to donate: those of the user, else those of a `jax.jit` function."""
        return call.donated or None if self.donate_argnums is None else self.donate_argnums

    def _compile(self, call: PositionalCall) -> tuple["_Compiled", tuple[Any, ...]]:
        """Return the compiled step for such arguments, from the cache or new, and the pytree of their arrays.

        Raises `UserError` inside a JAX transformation, and if the step needs more memory than JAX may use
        (`check_granted`).
        """
        import jax
        from jax.core import Tracer

        extracted = arrays_of(call.args)
        leaves, tree = jax.tree.flatten(extracted.args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            name = getattr(self.fn, "__name__", "the function")
            raise UserError(
                f"`{name}` is compiled under a plan and cannot be called inside jax.jit, jax.grad or jax.vmap: "
                "plan the whole step and call that."
            )
        abstract = [_abstract(leaf) for leaf in leaves]
        key = (extracted.key, call.key, tree, tuple((leaf.shape, leaf.dtype, leaf.weak_type) for leaf in abstract))
        if key not in self._compiled:
            make = self._staged if self.application.plan.by_stage else self._planned
            # Explicit axes of a mesh around the call would put shardings into the trace of arrays that have none.
            around = jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
            apart = around and all(in_type(leaf) is None for leaf in leaves)
            with jax.set_mesh(self.application.mesh) if apart else contextlib.nullcontext():
                self._compiled[key] = make(call, tree.unflatten(abstract))
        return self._compiled[key], extracted.args

    def _planned(self, call: PositionalCall, abstract: tuple[Any, ...]) -> "_Compiled":
        """Return the step compiled as one program."""
        import jax

        function = functional(in_recipe(self.application.plan, call.fn), call.args)
        lowered = self.application.lower(function.fn, abstract, self._donated(call))
        shardings = jax.tree.unflatten(jax.tree.structure(abstract), self.application.in_shardings())
        compiled = compile_lowered(lowered)
        check_granted(self.application.plan, compiled, self.application.mesh.devices.flat)
        return _Compiled(compiled, shardings, function)

    def _staged(self, call: PositionalCall, abstract: tuple[Any, ...]) -> "_Compiled":
        """Return the step split into a program for each stage."""
        import jax

        function = functional(call.fn, call.args)
        positions = self.application._donated(function.fn, abstract, self._donated(call))
        donated = [number in positions for number, each in enumerate(abstract) for _ in jax.tree.leaves(each)]
        step = StagedStep(self.application, function.fn, abstract, donated)
        return _Compiled(step, jax.tree.unflatten(jax.tree.structure(abstract), step.shardings()), function)


def compile_lowered(lowered: Any) -> Any:
    """Compile a `jax.stages.Lowered` into a `jax.stages.Compiled` that accepts arrays of any dtype.

    XLA gives arguments of 4 bits and fewer a layout that states their bits. Arrays of jax 0.10 have the same bits, but
    their layout states none. For that reason jax refuses to call the compiled program; `jax.jit` does not compare
    layouts.
    """
    import jax

    compiled = lowered.compile()
    for each in jax.tree.leaves(compiled.input_formats):
        if _bits_in(each.layout) and not _arrays_state_bits():
            each.layout.sub_byte_element_size_in_bits = 0
    return compiled


def _bits_in(layout: Any) -> int:
    """Return the bits of an element that a layout states; 0 if it states none."""
    return getattr(layout, "sub_byte_element_size_in_bits", 0)


@functools.cache
def _arrays_state_bits() -> bool:
    """Return True if the layout of an array of 4 bits states the bits, as that of a compiled argument does; tested
    once.
    """
    import jax.numpy as jnp

    array: Any = jnp.zeros(1, "int4")
    return bool(_bits_in(array.format.layout))


@dataclasses.dataclass(frozen=True, slots=True)
class _Compiled:
    """Compiled step, the shardings of its arguments, and the function over arrays that it computes."""

    step: Any
    """Compiled step, a `jax.stages.Compiled` or a `StagedStep`."""
    shardings: tuple[Any, ...]
    """Pytrees of `NamedSharding` like the arrays of the arguments."""
    function: Functional
    """Function over arrays, whose `finish` turns results into those of the original."""


def _abstract(leaf: Any) -> Any:
    """Return the `jax.ShapeDtypeStruct` of an argument, with its explicit sharding if its type has one.

    A Python number becomes a weakly typed scalar. Dtypes are canonicalised as JAX does, except those of a
    `ShapeDtypeStruct`. Raises `UserError` if it is no array or number.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=in_type(leaf))
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        if not isinstance(leaf, (bool, int, float, complex)):
            raise UserError(f"an argument is a {type(leaf).__name__}; expected arrays or jax.ShapeDtypeStruct.")
        return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.result_type(leaf)), weak_type=True)
    dtype = leaf.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype, weak_type=weak, sharding=in_type(leaf))


def _step_of(
    fn: Any, donate_argnums: int | Sequence[int] | None
) -> tuple[Callable[..., Any], int | Sequence[int] | None]:
    """Return a function, or a program's step, and its donated arguments; `donate_argnums` overrides the program's.

    Raises `UserError` if `fn` is neither a `Program` nor callable.
    """
    if isinstance(fn, Program):
        return fn.fn, fn.donate_argnums if donate_argnums is None else donate_argnums
    if not callable(fn):
        raise UserError(f"a plan is for a function or an autoshard.Program; found {fn!r}.")
    return fn, donate_argnums
