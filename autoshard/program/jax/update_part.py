"""Detection, in a step's jaxpr, of the part that updates stacks of layers element by element.

An update is the elementwise computation from optimizer state to a result of the step. It includes the elementwise
equations whose results only it consumes. State that any other op reads (a norm, a mean of a row) is excluded.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from autoshard.program.jax.jaxprs import scan_operands


_ELEMENTWISE = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type copy copy_p cos div eq erf exp exp2 expm1 floor ge gt "
    "integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow reduce_precision rem round "
    "rsqrt select_n sign sin sqrt square stop_gradient sub tanh xor".split()
)
"""Primitives in which each element of the results depends only on the same elements of the operands."""

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
"""Primitives that run an inner jaxpr once on their operands, and can be inlined."""
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Names of the parameter in which an equation has a jaxpr that takes its operands one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class StackUpdate:
    """An elementwise computation on stacks of one shape, some of which are in the hosts' memory."""

    equations: tuple[Any, ...]
    """Equations of the update, in the program's order."""
    inputs: tuple[Any, ...]
    """Stacks that the update consumes."""
    outputs: tuple[Any, ...]
    """Stacks that the program returns."""
    replaces: Mapping[Any, Any]
    """Output -> the argument that it replaces, if there is one."""
    hosted: frozenset[Any]
    """Arguments in the hosts' memory; the outputs that replace them are stored there too."""

    @property
    def layers(self) -> int:
        """The leading dim of the stacks."""
        return int(self.inputs[0].aval.shape[0])


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateSplit:
    """A program, split into the updates at its end that run layer by layer, and all else."""

    before: tuple[Any, ...]
    """Equations outside of the updates, which run first."""
    returned: tuple[Any, ...]
    """Results of the program: variables, and literals."""
    updates: tuple[StackUpdate, ...]
    hosted: tuple[int, ...]
    """Positions of the arguments that are stored in the hosts' memory."""


def split_updates(jaxpr: Any, ties: Mapping[int, int], wanted: Collection[int]) -> UpdateSplit:
    """Split a program into the updates of the arguments `wanted` that can run layer by layer, and all else.

    - `ties`: position of an argument -> position of the result that replaces it.
    - `wanted`: positions of the arguments that may be stored in the hosts' memory.

    A scan of the program must run over one of an update's stacks. No op that is not elementwise may depend on the
    update's state. Arguments of `wanted` without such an update are not in the result's `hosted`. Calls are inlined
    (`flat_equations`).
    """
    equations, outvars = flat_equations(jaxpr)
    returned = {v for v in outvars if is_var(v)}
    tied = {jaxpr.invars[a]: outvars[r] for a, r in ties.items() if is_var(outvars[r])}
    state = {jaxpr.invars[n] for n in wanted if jaxpr.invars[n] in tied}
    inside, elsewhere = _inside(equations, state, returned)
    stacks = _layered(equations, {v: frozenset((v,)) for v in jaxpr.invars})
    split_off: set[int] = set()
    updates = []
    for members in _components(equations, inside):
        update = _update([equations[k] for k in members], tied, state, returned)
        if update is None or stacks.isdisjoint((*update.inputs, *update.replaces.values())):
            continue  # no parameters that a scan runs over
        if not elsewhere.isdisjoint(_variables(update)):
            continue
        updates.append(update)
        split_off.update(members)
    hosted = {v for update in updates for v in update.hosted}
    before = tuple(each for k, each in enumerate(equations) if k not in split_off)
    hosted_positions = tuple(n for n in sorted(wanted) if jaxpr.invars[n] in hosted)
    return UpdateSplit(before, tuple(outvars), tuple(updates), hosted_positions)


def is_var(value: Any) -> bool:
    """Return True if an operand of an equation is a variable, not a literal."""
    return not hasattr(value, "val")


def flat_equations(jaxpr: Any) -> tuple[list[Any], list[Any]]:
    """Return the equations and results of a jaxpr, with each call replaced by the equations of the called function.

    Calls that state shardings, and bodies of loops and conditionals, stay as they are.
    """
    import jax.extend.core as jex

    flat: list[Any] = []

    def walk(eqns: Iterable[Any], named: dict[Any, Any], stack: Any) -> None:
        for eqn in eqns:
            invars = [named.get(v, v) if is_var(v) else v for v in eqn.invars]
            source = eqn.source_info
            if stack is not None:
                source = source.replace(name_stack=stack + source.name_stack)
            if eqn.primitive.name in _CALLS and _is_plain(eqn):
                inner, consts = _called(eqn)
                own = dict(zip(inner.invars, invars, strict=True))
                own |= {v: jex.Literal(c, v.aval) for v, c in zip(inner.constvars, consts, strict=True)}
                walk(inner.eqns, own, source.name_stack.extend(f"jit({eqn.params.get('name', 'call')})"))
                results = [own.get(v, v) if is_var(v) else v for v in inner.outvars]
                named.update(zip(eqn.outvars, results, strict=True))
            elif stack is None:
                flat.append(eqn.replace(invars=invars))
            else:
                outvars = [v if isinstance(v, jex.DropVar) else jex.Var(v.aval) for v in eqn.outvars]
                named.update(zip(eqn.outvars, outvars, strict=True))
                flat.append(eqn.replace(invars=invars, outvars=outvars, source_info=source))

    names: dict[Any, Any] = {}
    walk(jaxpr.eqns, names, None)
    return flat, [names.get(v, v) if is_var(v) else v for v in jaxpr.outvars]


def _is_plain(eqn: Any) -> bool:
    """Return True if a call states no shardings."""
    shardings = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    return all(type(each).__name__ == "UnspecifiedValue" for each in shardings)


def _called(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """Return the open jaxpr that an equation calls with its operands, and its constants; `(None, ())` without one."""
    called = next((eqn.params[key] for key in _INNER if key in eqn.params), None)
    if called is None:
        return None, ()
    return (called.jaxpr, called.consts) if hasattr(called, "consts") else (called, ())


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a variable or literal; that of a scalar if its type has none."""
    return tuple(getattr(value.aval, "shape", ()))


def _is_elementwise(eqn: Any) -> bool:
    """Return True if an equation's only result is an array, and if its elements depend on the same elements of
    operands, or on scalars.

    Return False for scalar results and for equations with effects. The broadcast of a scalar counts as elementwise.
    """
    if len(eqn.outvars) != 1 or eqn.effects:
        return False
    shape = _shape(eqn.outvars[0])
    if eqn.primitive.name == "broadcast_in_dim":
        return bool(shape) and len(eqn.invars) == 1 and not _shape(eqn.invars[0])
    return bool(shape) and eqn.primitive.name in _ELEMENTWISE and all(_shape(v) in (shape, ()) for v in eqn.invars)


def _inside(equations: Sequence[Any], state: Collection[Any], returned: Collection[Any]) -> tuple[set[int], set[Any]]:
    """Return the numbers of the equations that may belong to updates, and all operands and results of excluded ones.

    `state` are variables of hosted state, and `returned` those that the program returns.

    Elementwise equations belong if they depend on state, or if only such equations use their result and the program
    does not return it. Excluded equations depend on state, but are not elementwise.
    """
    inside: set[int] = set()
    after, elsewhere = set(state), set[Any]()
    for number, eqn in enumerate(equations):
        operands = [v for v in eqn.invars if is_var(v)]
        if after.isdisjoint(operands):
            continue
        after.update(eqn.outvars)
        if _is_elementwise(eqn):
            inside.add(number)
        else:
            elsewhere.update(operands, eqn.outvars)
    users: dict[Any, list[int]] = defaultdict(list)
    for number, eqn in enumerate(equations):
        for value in eqn.invars:
            if is_var(value):
                users[value].append(number)
    for number in reversed(range(len(equations))):
        results = equations[number].outvars
        if number in inside or not _is_elementwise(equations[number]) or results[0] in returned:
            continue
        if users[results[0]] and inside.issuperset(users[results[0]]):
            inside.add(number)
    return inside, elsewhere


def _components(equations: Sequence[Any], inside: Collection[int]) -> list[list[int]]:
    """Return the groups of equations `inside` that arrays connect, as their numbers in the program's order.

    A shared scalar connects nothing.
    """
    import networkx

    graph = networkx.Graph()
    for number in inside:
        networkx.add_path(graph, [v for v in (*equations[number].invars, *equations[number].outvars) if _is_array(v)])
    component = {v: k for k, variables in enumerate(networkx.connected_components(graph)) for v in variables}
    members: dict[int, list[int]] = defaultdict(list)
    for number in sorted(inside):
        members[component[equations[number].outvars[0]]].append(number)
    return list(members.values())


def _is_array(value: Any) -> bool:
    """Return True for a variable that is no scalar."""
    return is_var(value) and bool(_shape(value))


def _update(
    members: Sequence[Any], tied: Mapping[Any, Any], state: Collection[Any], returned: Collection[Any]
) -> StackUpdate | None:
    """Return the update of stacks by connected equations; None if it replaces no argument in `state`.

    None is also the result if the first equation computes no stack.
    A stack has at least two dims and at least two layers. An output replaces an argument of the same shape and dtype.

    - `members`: the equations.
    - `tied`: argument -> the result that replaces it.
    - `state`: arguments that may be stored in the hosts' memory.
    - `returned`: results of the program.
    """
    shape = _shape(members[0].outvars[0])
    if len(shape) < 2 or shape[0] < 2:
        return None
    results = {eqn.outvars[0] for eqn in members}
    operands = [v for eqn in members for v in eqn.invars if _is_array(v) and v not in results]
    inputs = tuple(dict.fromkeys(operands))
    outputs = tuple(v for v in dict.fromkeys(eqn.outvars[0] for eqn in members) if v in returned)
    results = {out for out in outputs if _shape(out) == shape}
    over = {
        out: v for v, out in tied.items() if out in results and _shape(v) == shape and v.aval.dtype == out.aval.dtype
    }
    hosted = frozenset(v for v in over.values() if v in state)
    return StackUpdate(tuple(members), inputs, outputs, over, hosted) if hosted else None


def _variables(update: StackUpdate) -> set[Any]:
    """Return all variables that the update's equations consume or compute, scalars and intermediate values included."""
    return {v for eqn in update.equations for v in (*eqn.invars, *eqn.outvars) if is_var(v)}


def _layered(equations: Iterable[Any], roots: dict[Any, frozenset[Any]]) -> set[Any]:
    """Return the arguments over whose leading dim a scan runs, also inside called functions.

    `roots` maps a variable to the arguments that it stands for. Results with the shape of the operand at the same
    position are added to it.
    """
    scanned: set[Any] = set()
    for eqn in equations:
        behind = [roots.get(v, frozenset()) if is_var(v) else frozenset[Any]() for v in eqn.invars]
        if not any(behind):
            continue
        inner, _ = _called(eqn)
        if eqn.primitive.name == "scan":
            fixed, carried = scan_operands(eqn)
            scanned.update(*behind[fixed + carried :])
            scanned |= _layered(inner.eqns, dict(zip(inner.invars[:fixed], behind[:fixed], strict=True)))
        elif inner is not None and len(inner.invars) == len(behind):
            scanned |= _layered(inner.eqns, dict(zip(inner.invars, behind, strict=True)))
        elif len(eqn.invars) == len(eqn.outvars):
            for value, given, above in zip(eqn.outvars, eqn.invars, behind, strict=True):
                if _shape(value) == _shape(given):
                    roots[value] = above
    return scanned
