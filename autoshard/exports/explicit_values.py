"""What JAX's explicit sharding mode makes of a step, value by value, beside what a plan has.

JAX itself is asked, equation by equation, for the type of every value from the plan's specs of the arguments. Gradients
are left out: explicit mode gives each the type of the value that it is a gradient of.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.graph import Op, OpClass
from autoshard.planning import Plan, ProgramGraph, Spec, program_graph
from autoshard.program import Program, scan_operands


@dataclasses.dataclass(frozen=True, slots=True)
class Hint:
    """One place of a step where the plan has another spec than explicit mode's types come to, or JAX asks for one."""

    place: str
    """`step.py:12 dot_general`, with `operand 1` behind it where the hint is for what the op takes."""
    shape: tuple[int, ...]
    spec: Spec | None
    """None if the plan's spec of the value is not known, or does not split it evenly."""
    asked: bool
    """Whether JAX comes to no type of its own."""
    primitive: str
    operand: int | None = None


def explicit_hints(plan: Plan, program: Program) -> tuple[list[Hint], int]:
    """The hints of a plan in program order, and how many of its pinned intermediates belong to gradients.

    Raises `UserError` for another program than the planned one.
    """
    import jax

    graph = program_graph(program, plan)
    closed = jax.make_jaxpr(program.fn)(*program.args)
    typer = _Typer(plan, graph)
    typer.match(closed.jaxpr)
    typer.reach(closed.jaxpr, [True] * len(closed.jaxpr.outvars), "")
    typer.run(closed.jaxpr, [tuple(spec.dims) for spec in plan.arguments.values()], "")
    ops = {op.number: op.name for op in graph.reading.graph.ops}
    return typer.hints, sum(_of_gradient(ops.get(pin.op, pin.name)) for pin in plan.pins)


Dims = tuple[tuple[str, ...], ...]

_HELPERS = ("constant", "broadcast_in_dim", "convert", "iota")
"""Kinds of ops that a primitive of another name may bring along."""

_REGIONS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"} | {
    "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"
}  # fmt: skip
"""Primitives that do what their equations do -> the parameter that has these."""


def _of_gradient(stack: str) -> bool:
    return "transpose(jvp" in stack


def _stack(eqn: Any, outer: str) -> str:
    return f"{outer}/{eqn.source_info.name_stack}"


def _inner(value: Any) -> Any:
    """The equations of a parameter, whether it brings constants of its own or not."""
    return getattr(value, "jaxpr", value)


class _Typer:
    """Goes through the equations of a step with the types of their values."""

    def __init__(self, plan: Plan, graph: ProgramGraph) -> None:
        from jax.sharding import AbstractMesh, AxisType

        self.plan, self.graph = plan, graph
        axes = tuple(plan.mesh)
        self.mesh = AbstractMesh(tuple(plan.mesh.values()), axes, axis_types=(AxisType.Explicit,) * len(axes))
        self.pinned = {(pin.op, pin.index) for pin in plan.pins if pin.operand is None}
        self.ops: dict[int, Op] = {}
        self.reached: set[int] = set()
        self.hints: list[Hint] = []

    # Which op of the program an equation has become

    def match(self, jaxpr: Any) -> None:
        """Finds the op of every equation: those of one name and shape stand in the same order."""
        equations: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        self._collect(jaxpr, "", equations)
        tensors = self.graph.reading.graph.tensors
        ops: dict[tuple[Any, ...], list[Op]] = defaultdict(list)
        for op in self.graph.reading.graph.ops:
            if op.results:
                name = op.name.rpartition("/")[2]
                ops[(name, tensors[op.results[0]].shape, _of_gradient(op.name))].append(op)
        for key, same in equations.items():
            found = ops.get(key, [])
            if len(found) != len(same):
                found = [op for op in found if op.kind not in _HELPERS]
            if len(found) == len(same):
                self.ops |= {id(eqn): op for eqn, op in zip(same, found, strict=True)}

    def _collect(self, jaxpr: Any, outer: str, found: dict[tuple[Any, ...], list[Any]]) -> None:
        for eqn in jaxpr.eqns:
            name, stack = eqn.primitive.name, _stack(eqn, outer)
            inner = [eqn.params[key] for key in (_REGIONS.get(name), "cond_jaxpr", "body_jaxpr") if key in eqn.params]
            inner += eqn.params.get("branches", ())
            if name == "scan":
                inner.append(eqn.params["jaxpr"])
            for each in inner:
                self._collect(_inner(each), stack, found)
            if not inner and eqn.outvars and hasattr(eqn.outvars[0].aval, "shape"):
                found[(name, tuple(eqn.outvars[0].aval.shape), _of_gradient(stack))].append(eqn)

    # Which equations the step's own code stands for

    def reach(self, jaxpr: Any, used: Sequence[bool], outer: str) -> None:
        """Finds the equations whose results come to the step's results otherwise than through gradients.

        The others are derivatives, which no code of the step says.
        """
        wanted = {var for var, use in zip(jaxpr.outvars, used, strict=True) if use and not hasattr(var, "val")}
        for eqn in reversed(jaxpr.eqns):
            stack = _stack(eqn, outer)
            uses = [var in wanted for var in eqn.outvars]
            if _of_gradient(stack) or not any(uses):
                continue
            self.reached.add(id(eqn))
            wanted |= {atom for atom in eqn.invars if not hasattr(atom, "val")}
            name, params = eqn.primitive.name, eqn.params
            if name == "scan":
                _, carried = scan_operands(eqn)
                self.reach(_inner(params["jaxpr"]), [True] * carried + uses[carried:], stack)
            elif name in _REGIONS and _REGIONS[name] in params:
                self.reach(_inner(params[_REGIONS[name]]), uses, stack)
            for each in (*params.get("branches", ()), *(params[k] for k in ("body_jaxpr",) if k in params)):
                self.reach(_inner(each), [True] * len(_inner(each).outvars), stack)

    # Types

    def run(self, jaxpr: Any, ins: Sequence[Dims | None], outer: str) -> list[Dims | None]:
        """The types of what some equations give, from those of what they take; None for what follows gradients."""
        known: dict[Any, Dims | None] = dict(zip(jaxpr.invars, ins, strict=True))
        known |= {var: _whole(var) for var in jaxpr.constvars}

        def read(atom: Any) -> Dims | None:
            return _whole(atom) if hasattr(atom, "val") else known[atom]

        for eqn in jaxpr.eqns:
            outs = self._types(eqn, [read(atom) for atom in eqn.invars], _stack(eqn, outer))
            known |= dict(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _types(self, eqn: Any, ins: list[Dims | None], stack: str) -> list[Dims | None]:
        name, params = eqn.primitive.name, eqn.params
        if _of_gradient(stack):
            return [None] * len(eqn.outvars)
        if name in _REGIONS and _REGIONS[name] in params:
            return self.run(_inner(params[_REGIONS[name]]), ins, stack)
        if name == "scan":
            return self._scan(eqn, ins, stack)
        if name == "while":
            conditions, constants = params["cond_nconsts"], params["body_nconsts"]
            self.run(_inner(params["body_jaxpr"]), ins[conditions:], stack)
            return ins[conditions + constants :]
        if name == "cond":
            return [self.run(_inner(branch), ins[1:], stack) for branch in params["branches"]][-1]
        if None in ins:
            return [self._beside_gradient(eqn, ins, var) for var in eqn.outvars]
        return self._one(eqn, ins)

    def _scan(self, eqn: Any, ins: list[Dims | None], stack: str) -> list[Dims | None]:
        fixed, carried = scan_operands(eqn)
        slices = [None if dims is None else dims[1:] for dims in ins[fixed + carried :]]
        outs = self.run(_inner(eqn.params["jaxpr"]), [*ins[: fixed + carried], *slices], stack)
        stacked = [None if dims is None else ((), *dims) for dims in outs[carried:]]
        return [*ins[fixed : fixed + carried], *stacked]

    def _beside_gradient(self, eqn: Any, ins: Sequence[Dims | None], out: Any) -> Dims | None:
        """The type of what is made of a gradient: that of what it is put together with, where there is such."""
        shape = out.aval.shape
        alike = (
            dims for dims, atom in zip(ins, eqn.invars, strict=True)
            if dims is not None and shape and getattr(atom.aval, "shape", None) == shape
        )  # fmt: skip
        return next(alike, None)

    def _one(self, eqn: Any, ins: list[Dims | None]) -> list[Dims | None]:
        """The types of one equation's results, by JAX or, where it differs, by the plan, with hints for these."""
        op, written = self.ops.get(id(eqn)), id(eqn) in self.reached
        if written and op is not None and eqn.primitive.name == "dot_general":
            ins = self._operands(eqn, op, ins)
        found = self._inferred(eqn, ins)
        outs: list[Dims | None] = []
        for number, var in enumerate(eqn.outvars):
            shape = tuple(getattr(var.aval, "shape", ()))
            tensor = op.results[number] if op is not None and number < len(op.results) else None
            wanted = None if tensor is None else self._even(self.graph.held(tensor), shape)
            own = None if found is None else found[number]
            firm = op is not None and (op.op_class is OpClass.HEAVY or (op.number, number) in self.pinned)
            if own is None and shape or (firm and wanted is not None and own != wanted.dims):
                if written:
                    self._add(eqn, op, Hint("", shape, wanted, own is None, eqn.primitive.name))
                own = ((),) * len(shape) if wanted is None else wanted.dims
            outs.append(() if own is None else own)
        return outs

    def _operands(self, eqn: Any, op: Op, ins: list[Dims | None]) -> list[Dims | None]:
        """What a matmul takes, with hints where the plan brings it there in another spec."""
        outs = []
        for number, (dims, atom) in enumerate(zip(ins, eqn.invars, strict=True)):
            taken = self.graph.taken(op, number) if number < len(op.operands) else None
            shape = tuple(atom.aval.shape)
            wanted = None
            if taken is not None and len(taken.dims) == len(shape):
                wanted = self._even(taken, shape)
            if wanted is not None and wanted.dims != dims:
                self._add(eqn, op, Hint("", shape, wanted, False, eqn.primitive.name, number))
                dims = wanted.dims
            outs.append(dims)
        return outs

    def _even(self, spec: Spec, shape: tuple[int, ...]) -> Spec | None:
        """A spec, if a type can have it: explicit mode splits evenly only."""
        if len(spec.dims) != len(shape):
            return None
        counts = [self._parts(axes) for axes in spec.dims]
        return spec if all(size % count == 0 for size, count in zip(shape, counts, strict=True)) else None

    def _parts(self, axes: Sequence[str]) -> int:
        count = 1
        for axis in axes:
            count *= self.plan.mesh[axis]
        return count

    def _inferred(self, eqn: Any, ins: Sequence[Dims | None]) -> list[Dims] | None:
        """The types that JAX gives to the results of an equation; None if it comes to none."""
        import jax
        from jax.sharding import NamedSharding

        places = [n for n, atom in enumerate(eqn.invars) if not hasattr(atom, "val")]
        shapes = []
        for place in places:
            aval = eqn.invars[place].aval
            if not hasattr(aval, "dtype"):
                return None
            sharding = NamedSharding(self.mesh, Spec(ins[place] or ()).partition_spec())
            shapes.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding))

        def bind(*given: Any) -> Any:
            taken = dict(zip(places, given, strict=True))
            values = [taken[n] if n in taken else atom.val for n, atom in enumerate(eqn.invars)]
            return eqn.primitive.bind(*values, **eqn.params)

        try:
            with jax.sharding.use_abstract_mesh(self.mesh):
                outs = jax.tree.leaves(jax.eval_shape(bind, *shapes))
        except Exception:  # noqa: BLE001 JAX's error for this has no public name, and rules raise others as well
            return None
        return [_dims(out) for out in outs]

    def _add(self, eqn: Any, op: Op | None, hint: Hint) -> None:
        line = op.line if op is not None and op.line else _line(eqn)
        place = f"{line} {hint.primitive}".strip() + ("" if hint.operand is None else f" operand {hint.operand}")
        names = {each.place: each for each in self.hints}
        name, count = place, 1
        while name in names:
            if dataclasses.replace(names[name], place="") == hint:
                return
            count += 1
            name = f"{place} #{count}"
        self.hints.append(dataclasses.replace(hint, place=name))


def _whole(atom: Any) -> Dims:
    return ((),) * len(getattr(atom.aval, "shape", ()))


def _line(eqn: Any) -> str:
    """The innermost line outside of JAX that an equation comes from."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    for frame in frames:
        if "/site-packages/" not in frame.file_name and not frame.file_name.startswith("<"):
            return f"{frame.file_name.rpartition('/')[2]}:{frame.line_num}"
    return ""


def _dims(out: Any) -> Dims:
    """The axes of every dim of a type."""
    spec: Sequence[Any] = getattr(out.sharding, "spec", ()) if out.sharding is not None else ()
    entries = [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec]
    return (*entries, *((),) * (len(out.shape) - len(entries)))


def advice(hints: Sequence[Hint]) -> Mapping[str, str]:
    """For every primitive of some hints where the spec is written in a program."""
    return {hint.primitive: _ADVICE[hint.primitive] for hint in hints if hint.asked and hint.primitive in _ADVICE}


_ADVICE = {
    "dot_general": "`out_sharding=` of jnp.matmul, jnp.dot, jnp.einsum or jax.lax.dot_general",
    "gather": "`x.at[ids].get(out_sharding=...)` in place of `x[ids]`",
    "reshape": "`out_sharding=` of jnp.reshape",
    "broadcast_in_dim": "`out_sharding=` of jax.lax.broadcast_in_dim",
    "scatter-add": "`x.at[ids].add(..., out_sharding=...)`",
    "scatter": "`x.at[ids].set(..., out_sharding=...)`",
}
