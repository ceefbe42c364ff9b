"""Types that JAX's explicit sharding mode infers for the values of a step, compared with the plan's specs.

JAX itself infers the type of every value, equation by equation, from the plan's specs of the arguments. Gradients are
omitted, since explicit mode gives each gradient the type of its value.
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
    """One place of a step where the plan has another spec than explicit mode infers, or where JAX asks for a spec."""

    place: str
    """Place such as `step.py:12 dot_general`, followed by `operand 1` if the hint is for an operand."""
    shape: tuple[int, ...]
    """Shape of the value, unsplit."""
    spec: Spec | None
    """The plan's spec of the value; None if it is unknown, or does not split the value evenly."""
    asked: bool
    """True if JAX infers no type and asks for a spec; False if it infers another than the plan's."""
    primitive: str
    """Name of the JAX primitive."""
    operand: int | None = None
    """Number of the operand that the hint is for; None for a result."""


def explicit_hints(plan: Plan, program: Program) -> tuple[list[Hint], int]:
    """Return the hints of a plan in program order, and the number of its pins on values of backward passes.

    The program is traced again. Raises: UserError for a program other than the planned one.
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
"""Type of a value: the mesh axes that split each dim."""

_HELPERS = ("constant", "broadcast_in_dim", "convert", "iota")
"""Kinds of ops that a primitive of another name may emit in addition to its main op."""

_REGIONS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"} | {
    "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"
}  # fmt: skip
"""Primitives that run an inner jaxpr once -> the parameter with that jaxpr."""


def _of_gradient(stack: str) -> bool:
    """Return True if a name stack belongs to a backward pass (it contains `transpose(jvp`)."""
    return "transpose(jvp" in stack


def _stack(eqn: Any, outer: str) -> str:
    """Return the name stack of an equation, preceded by that of the jaxpr it lies in."""
    return f"{outer}/{eqn.source_info.name_stack}"


def _inner(value: Any) -> Any:
    """Return the open jaxpr of a parameter that is a closed or an open jaxpr."""
    return getattr(value, "jaxpr", value)


class _Typer:
    """Walk over the equations of a step that infers the types of their values and collects hints.

    `match` and `reach` must run before `run`, which fills `hints`.
    """

    def __init__(self, plan: Plan, graph: ProgramGraph) -> None:
        from jax.sharding import AbstractMesh, AxisType

        self.plan, self.graph = plan, graph
        axes = tuple(plan.mesh)
        self.mesh = AbstractMesh(tuple(plan.mesh.values()), axes, axis_types=(AxisType.Explicit,) * len(axes))
        self.pinned = {(pin.op, pin.index) for pin in plan.pins if pin.operand is None}
        self.ops: dict[int, Op] = {}
        self.reached: set[int] = set()
        self.hints: list[Hint] = []
        self.around = [""]
        """Lines of the equations around the present one, outer first; an equation without a line has that before it."""

    # Ops of the program that the equations were lowered to

    def match(self, jaxpr: Any) -> None:
        """Fill `ops` with the op of each equation, by the equation's id.

        Equations and ops of one name, result shape and pass (forward or backward) correspond in order. If their counts
        differ, helper ops are left out; if the counts still differ, these equations have no op.
        """
        equations: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        self._collect(jaxpr, "", equations)
        tensors = self.graph.reading.graph.tensors
        ops: dict[tuple[Any, ...], list[Op]] = defaultdict(list)
        for op in self.graph.reading.graph.ops:
            if op.results:
                name = op.name.rpartition("/")[2]
                ops[(name, tensors[op.results[0]].shape, _of_gradient(op.name))].append(op)
        for key, same in equations.items():
            candidates = ops.get(key, [])
            if len(candidates) != len(same):
                candidates = [op for op in candidates if op.kind not in _HELPERS]
            if len(candidates) == len(same):
                self.ops |= {id(eqn): op for eqn, op in zip(same, candidates, strict=True)}

    def _collect(self, jaxpr: Any, outer: str, found: dict[tuple[Any, ...], list[Any]]) -> None:
        """Append the equations of a jaxpr and of its inner jaxprs to `found`, by (name, shape of the first result, in a
        backward pass). Equations with inner jaxprs are not listed.
        """
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

    # Equations that the step's own code contains

    def reach(self, jaxpr: Any, used: Sequence[bool], outer: str) -> None:
        """Add to `reached` the ids of equations whose results reach the step's results without passing through
        gradients.

        A loss that nothing uses counts as a result.

        - `used`: True for each result of `jaxpr` that the step uses.
        - `outer`: name stack around `jaxpr`.

        All other equations are derivatives, which no code of the step contains.
        """
        wanted = {var for var, use in zip(jaxpr.outvars, used, strict=True) if use and not hasattr(var, "val")}
        # The loss is used by nothing if the step has its gradients alone (`jax.grad`).
        atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
        read = {atom for atom in atoms if not hasattr(atom, "val")}
        wanted |= {var for eqn in jaxpr.eqns for var in eqn.outvars if var not in read}
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
        """Return the types of a jaxpr's results from those of its inputs; None for values that depend on gradients.

        Constants and literals count as unsplit. Hints are recorded on the way.
        """
        known: dict[Any, Dims | None] = dict(zip(jaxpr.invars, ins, strict=True))
        known |= {var: _whole(var) for var in jaxpr.constvars}

        def read(atom: Any) -> Dims | None:
            """Return the type of a variable or literal."""
            return _whole(atom) if hasattr(atom, "val") else known[atom]

        for eqn in jaxpr.eqns:
            outs = self._types(eqn, [read(atom) for atom in eqn.invars], _stack(eqn, outer))
            known |= dict(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _types(self, eqn: Any, ins: list[Dims | None], stack: str) -> list[Dims | None]:
        """Return the types of one equation's results, inner jaxprs included.

        Equations of a backward pass give None. A `while` gives the types of its initial values, a `cond` those of its
        last branch.
        """
        if _of_gradient(stack):
            return [None] * len(eqn.outvars)
        self.around.append(_line(eqn) or self.around[-1])
        try:
            return self._types_at(eqn, ins, stack)
        finally:
            self.around.pop()

    def _types_at(self, eqn: Any, ins: list[Dims | None], stack: str) -> list[Dims | None]:
        """Return the types of the results of an equation outside of backward passes."""
        name, params = eqn.primitive.name, eqn.params
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
        """Return the types of a scan's results: carries have the types of their initial values, stacked results an
        unsplit leading dim.
        """
        fixed, carried = scan_operands(eqn)
        slices = [None if dims is None else dims[1:] for dims in ins[fixed + carried :]]
        outs = self.run(_inner(eqn.params["jaxpr"]), [*ins[: fixed + carried], *slices], stack)
        stacked = [None if dims is None else ((), *dims) for dims in outs[carried:]]
        return [*ins[fixed : fixed + carried], *stacked]

    def _beside_gradient(self, eqn: Any, ins: Sequence[Dims | None], out: Any) -> Dims | None:
        """Return the type of a value computed from a gradient: that of the first known input of the same shape, else
        None.

        A scalar has None too.
        """
        shape = out.aval.shape
        similar = (
            dims for dims, atom in zip(ins, eqn.invars, strict=True)
            if dims is not None and shape and getattr(atom.aval, "shape", None) == shape
        )  # fmt: skip
        return next(similar, None)

    def _one(self, eqn: Any, ins: list[Dims | None]) -> list[Dims | None]:
        """Return the types of one equation's results, by JAX unless it infers none or the plan decides otherwise;
        record hints there.

        The plan decides results of heavy ops and pinned results, if their planned spec is known and even. If JAX infers
        none, a result has the planned spec, or is unsplit if that is unknown. Only equations in `reached` give hints.
        """
        op, written = self.ops.get(id(eqn)), id(eqn) in self.reached
        if written and op is not None and eqn.primitive.name == "dot_general":
            ins = self._operands(eqn, op, ins)
        inferred = self._inferred(eqn, ins)
        outs: list[Dims | None] = []
        for number, var in enumerate(eqn.outvars):
            shape = tuple(getattr(var.aval, "shape", ()))
            tensor = op.results[number] if op is not None and number < len(op.results) else None
            wanted = None if tensor is None else self._even(self.graph.held(tensor), shape)
            own = None if inferred is None else inferred[number]
            decided = op is not None and (op.op_class is OpClass.HEAVY or (op.number, number) in self.pinned)
            if own is None and shape or (decided and wanted is not None and own != wanted.dims):
                if written:
                    self._add(eqn, op, Hint("", shape, wanted, own is None, eqn.primitive.name))
                own = ((),) * len(shape) if wanted is None else wanted.dims
            outs.append(() if own is None else own)
        return outs

    def _operands(self, eqn: Any, op: Op, ins: list[Dims | None]) -> list[Dims | None]:
        """Return the types of a matmul's operands: the planned ones where known and even, with hints where they
        differ.
        """
        outs = []
        for number, (dims, atom) in enumerate(zip(ins, eqn.invars, strict=True)):
            planned = self.graph.taken(op, number) if number < len(op.operands) else None
            shape = tuple(atom.aval.shape)
            wanted = None
            if planned is not None and len(planned.dims) == len(shape):
                wanted = self._even(planned, shape)
            if wanted is not None and wanted.dims != dims:
                self._add(eqn, op, Hint("", shape, wanted, False, eqn.primitive.name, number))
                dims = wanted.dims
            outs.append(dims)
        return outs

    def _even(self, spec: Spec, shape: tuple[int, ...]) -> Spec | None:
        """Return the spec if a value of that shape can have it in explicit mode: same rank, every dim divisible.
        Otherwise None.
        """
        if len(spec.dims) != len(shape):
            return None
        counts = [self._parts(axes) for axes in spec.dims]
        return spec if all(size % count == 0 for size, count in zip(shape, counts, strict=True)) else None

    def _parts(self, axes: Sequence[str]) -> int:
        """Return the number of parts that some axes split a dim into: the product of their sizes."""
        count = 1
        for axis in axes:
            count *= self.plan.mesh[axis]
        return count

    def _inferred(self, eqn: Any, ins: Sequence[Dims | None]) -> list[Dims] | None:
        """Return the types that JAX infers for the results of an equation; None if JAX raises, or an input has no
        dtype.
        """
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
            """Run the equation's primitive on its non-literal inputs."""
            arguments = dict(zip(places, given, strict=True))
            values = [arguments[n] if n in arguments else atom.val for n, atom in enumerate(eqn.invars)]
            return eqn.primitive.bind(*values, **eqn.params)

        try:
            with jax.sharding.use_abstract_mesh(self.mesh):
                outs = jax.tree.leaves(jax.eval_shape(bind, *shapes))
        except Exception:  # noqa: BLE001 JAX's error for this has no public name, and rules raise others as well
            return None
        return [_dims(out) for out in outs]

    def _add(self, eqn: Any, op: Op | None, hint: Hint) -> None:
        """Append a hint at its place (`file:line primitive`), numbered (`#2`, ...) if another hint has the place.

        The line is the nearest one of the step's own code. A hint without any, which no one could apply, and one that
        equals an earlier one of its place are omitted.
        """
        line = op.line if op is not None and op.line else self.around[-1]
        if not line:
            return
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
    """Return the type of a value that no axis splits; `()` for a value without shape."""
    return ((),) * len(getattr(atom.aval, "shape", ()))


def _line(eqn: Any) -> str:
    """Return `file.py:line` of the innermost frame outside of installed packages that an equation originates from.

    Empty if there is none.
    """
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    for frame in frames:
        if "/site-packages/" not in frame.file_name and not frame.file_name.startswith("<"):
            return f"{frame.file_name.rpartition('/')[2]}:{frame.line_num}"
    return ""


def _dims(out: Any) -> Dims:
    """Return the mesh axes of every dim of an abstract value; dims beyond the length of its spec have none."""
    spec: Sequence[Any] = getattr(out.sharding, "spec", ()) if out.sharding is not None else ()
    entries = [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec]
    return (*entries, *((),) * (len(out.shape) - len(entries)))


def advice(hints: Sequence[Hint]) -> Mapping[str, str]:
    """Return for each primitive that asks for a spec the argument or call that sets it in a program; primitives without
    such advice are missing.
    """
    return {hint.primitive: _ADVICE[hint.primitive] for hint in hints if hint.asked and hint.primitive in _ADVICE}


_ADVICE = {
    "dot_general": "`out_sharding=` of jnp.matmul, jnp.dot, jnp.einsum or jax.lax.dot_general",
    "gather": "`x.at[ids].get(out_sharding=...)` in place of `x[ids]`",
    "reshape": "`out_sharding=` of jnp.reshape",
    "broadcast_in_dim": "`out_sharding=` of jax.lax.broadcast_in_dim",
    "scatter-add": "`x.at[ids].add(..., out_sharding=...)`",
    "scatter": "`x.at[ids].set(..., out_sharding=...)`",
}
"""Argument or call by primitive that sets the spec of its result."""
