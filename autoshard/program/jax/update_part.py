"""Which part of a step is the elementwise update of stacks of layers, found in its jaxpr.

An update is what follows from optimizer state elementwise, up to what the step returns, and whatever elementwise
equations only lead there. What takes the state otherwise (a norm, a row's mean) keeps it out.
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
"""Primitives that make each element of their results of the same elements of their operands."""

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""What an equation calls its jaxpr whose arguments are its own, one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class StackUpdate:
    """What is computed elementwise of stacks of one shape, some of which wait on the host."""

    equations: tuple[Any, ...]
    """They are in the order of the program."""
    inputs: tuple[Any, ...]
    """Stacks that it takes."""
    outputs: tuple[Any, ...]
    """Stacks that the program returns."""
    over: Mapping[Any, Any]
    """For an output the argument in whose place it is written, where there is one."""
    away: frozenset[Any]
    """Arguments that wait on the host; so do the outputs in their places."""

    @property
    def layers(self) -> int:
        """The leading dim of its stacks."""
        return int(self.inputs[0].aval.shape[0])


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateSplit:
    """A program, and the updates at its end that are made layer by layer."""

    before: tuple[Any, ...]
    """Equations of everything else, which come first."""
    returned: tuple[Any, ...]
    """What the program returns: variables, and literals."""
    updates: tuple[StackUpdate, ...]
    held: tuple[int, ...]
    """Positions of the arguments that wait on the host."""


def split_updates(jaxpr: Any, ties: Mapping[int, int], wanted: Collection[int]) -> UpdateSplit:
    """The updates of those arguments in `wanted` that can be made layer by layer.

    `ties` gives for the position of an argument that of the result in its place.
    """
    equations, outvars = flat_equations(jaxpr)
    returned = {v for v in outvars if is_var(v)}
    tied = {jaxpr.invars[a]: outvars[r] for a, r in ties.items() if is_var(outvars[r])}
    state = {jaxpr.invars[n] for n in wanted if jaxpr.invars[n] in tied}
    inside, elsewhere = _inside(equations, state, returned)
    stacks = _layered(equations, {v: frozenset((v,)) for v in jaxpr.invars})
    taken: set[int] = set()
    updates = []
    for members in _components(equations, inside):
        update = _update([equations[k] for k in members], tied, state, returned)
        if update is None or stacks.isdisjoint((*update.inputs, *update.over.values())):
            continue  # not of parameters that a scan runs over
        if not elsewhere.isdisjoint(_variables(update)):
            continue
        updates.append(update)
        taken.update(members)
    away = {v for update in updates for v in update.away}
    before = tuple(each for k, each in enumerate(equations) if k not in taken)
    held = tuple(n for n in sorted(wanted) if jaxpr.invars[n] in away)
    return UpdateSplit(before, tuple(outvars), tuple(updates), held)


def is_var(value: Any) -> bool:
    """Whether an operand of an equation is a variable, and no literal."""
    return not hasattr(value, "val")


def flat_equations(jaxpr: Any) -> tuple[list[Any], list[Any]]:
    """Its equations and what it returns; in the place of a call stand the equations of what is called."""
    import jax.extend.core as jex

    found: list[Any] = []

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
                made = [own.get(v, v) if is_var(v) else v for v in inner.outvars]
                named.update(zip(eqn.outvars, made, strict=True))
            elif stack is None:
                found.append(eqn.replace(invars=invars))
            else:
                outvars = [v if isinstance(v, jex.DropVar) else jex.Var(v.aval) for v in eqn.outvars]
                named.update(zip(eqn.outvars, outvars, strict=True))
                found.append(eqn.replace(invars=invars, outvars=outvars, source_info=source))

    names: dict[Any, Any] = {}
    walk(jaxpr.eqns, names, None)
    return found, [names.get(v, v) if is_var(v) else v for v in jaxpr.outvars]


def _is_plain(eqn: Any) -> bool:
    """Whether a call says nothing of shardings."""
    said = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    return all(type(each).__name__ == "UnspecifiedValue" for each in said)


def _called(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """What an equation calls with its operands as arguments, and constants in it; None if it calls nothing so."""
    found = next((eqn.params[key] for key in _INNER if key in eqn.params), None)
    if found is None:
        return None, ()
    return (found.jaxpr, found.consts) if hasattr(found, "consts") else (found, ())


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value.aval, "shape", ()))


def _is_elementwise(eqn: Any) -> bool:
    """Whether every element of its result is made of the same elements of its operands, or of scalars."""
    if len(eqn.outvars) != 1 or eqn.effects:
        return False
    shape = _shape(eqn.outvars[0])
    if eqn.primitive.name == "broadcast_in_dim":
        return bool(shape) and len(eqn.invars) == 1 and not _shape(eqn.invars[0])
    return bool(shape) and eqn.primitive.name in _ELEMENTWISE and all(_shape(v) in (shape, ()) for v in eqn.invars)


def _inside(equations: Sequence[Any], state: Collection[Any], returned: Collection[Any]) -> tuple[set[int], set[Any]]:
    """Equations that may belong to updates, and variables that something else makes of state, or takes."""
    inside: set[int] = set()
    after, elsewhere = set(state), set[Any]()
    for number, eqn in enumerate(equations):
        taken = [v for v in eqn.invars if is_var(v)]
        if after.isdisjoint(taken):
            continue
        after.update(eqn.outvars)
        if _is_elementwise(eqn):
            inside.add(number)
        else:
            elsewhere.update(taken, eqn.outvars)
    users: dict[Any, list[int]] = defaultdict(list)
    for number, eqn in enumerate(equations):
        for value in eqn.invars:
            if is_var(value):
                users[value].append(number)
    for number in reversed(range(len(equations))):
        made = equations[number].outvars
        if number in inside or not _is_elementwise(equations[number]) or made[0] in returned:
            continue
        if users[made[0]] and inside.issuperset(users[made[0]]):
            inside.add(number)
    return inside, elsewhere


def _components(equations: Sequence[Any], inside: Collection[int]) -> list[list[int]]:
    """Equations that arrays connect, in their order."""
    import networkx

    graph = networkx.Graph()
    for number in inside:
        networkx.add_path(graph, [v for v in (*equations[number].invars, *equations[number].outvars) if _is_array(v)])
    component = {v: k for k, found in enumerate(networkx.connected_components(graph)) for v in found}
    members: dict[int, list[int]] = defaultdict(list)
    for number in sorted(inside):
        members[component[equations[number].outvars[0]]].append(number)
    return list(members.values())


def _is_array(value: Any) -> bool:
    return is_var(value) and bool(_shape(value))


def _update(
    members: Sequence[Any], tied: Mapping[Any, Any], state: Collection[Any], returned: Collection[Any]
) -> StackUpdate | None:
    """What connected equations make of stacks; None if no state among them is replaced, or they are no stacks."""
    shape = _shape(members[0].outvars[0])
    if len(shape) < 2 or shape[0] < 2:
        return None
    made = {eqn.outvars[0] for eqn in members}
    taken = [v for eqn in members for v in eqn.invars if _is_array(v) and v not in made]
    inputs = tuple(dict.fromkeys(taken))
    outputs = tuple(v for v in dict.fromkeys(eqn.outvars[0] for eqn in members) if v in returned)
    made = {out for out in outputs if _shape(out) == shape}
    over = {out: v for v, out in tied.items() if out in made and _shape(v) == shape and v.aval.dtype == out.aval.dtype}
    away = frozenset(v for v in over.values() if v in state)
    return StackUpdate(tuple(members), inputs, outputs, over, away) if away else None


def _variables(update: StackUpdate) -> set[Any]:
    return {v for eqn in update.equations for v in (*eqn.invars, *eqn.outvars) if is_var(v)}


def _layered(equations: Iterable[Any], roots: dict[Any, frozenset[Any]]) -> set[Any]:
    """Arguments over whose leading dim a scan runs; `roots` has the arguments that a variable stands for."""
    found: set[Any] = set()
    for eqn in equations:
        behind = [roots.get(v, frozenset()) if is_var(v) else frozenset[Any]() for v in eqn.invars]
        if not any(behind):
            continue
        inner, _ = _called(eqn)
        if eqn.primitive.name == "scan":
            fixed, carried = scan_operands(eqn)
            found.update(*behind[fixed + carried :])
            found |= _layered(inner.eqns, dict(zip(inner.invars[:fixed], behind[:fixed], strict=True)))
        elif inner is not None and len(inner.invars) == len(behind):
            found |= _layered(inner.eqns, dict(zip(inner.invars, behind, strict=True)))
        elif len(eqn.invars) == len(eqn.outvars):
            for value, given, above in zip(eqn.outvars, eqn.invars, behind, strict=True):
                if _shape(value) == _shape(given):
                    roots[value] = above
    return found
