"""Parts of a step's jaxpr for pipeline stages: forward and backward work of each chunk of segments, and the update.

The chunks are runs of consecutive segments. A microbatch passes the forward parts in the order of the chunks and the
backward parts in reverse. The update runs once a step, on values that are accumulated over the microbatches.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program.jax.gradient_groups import Reduction, Relation, line_of, relations
from autoshard.program.jax.step_checks import Scales, check_constants, check_equations, check_linear
from autoshard.program.jax.update_part import flat_equations, is_var
from autoshard.program.segments import Part, segment_of


@dataclasses.dataclass(frozen=True, slots=True)
class StepPart:
    """Equations of a step that one stage runs as one program."""

    part: Part
    chunk: int
    """Number of the chunk in the order of the layers; for the update, the number of the stage."""
    equations: tuple[Any, ...]
    """The equations in the order of the trace."""
    inputs: tuple[Any, ...]
    """Variables that the equations use and do not compute."""
    outputs: tuple[Any, ...]
    """Variables that other parts use, or that the step returns."""
    weights: bool = False
    """True for a backward part that computes gradients of weights alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class SplitStep:
    """A step of one microbatch as parts, and the relation of its values to those of the whole batch."""

    closed: Any
    """The trace, a closed jaxpr; its variables name all values."""
    parts: tuple[StepPart, ...]
    """Forward parts by chunk, backward parts by chunk, and the parts of the update in an order that can be run."""
    results: tuple[Any, ...]
    """Results of the step: variables, and literals."""
    summed: Mapping[Any, Relation]
    """Values of microbatches that the update or the step's results use -> their relation to those of the batch.

    Its kind is `MEAN`, `SUM`, `CONST` or `EACH`.
    """
    owners: Mapping[Any, int]
    """Stage that stores each argument, by variable."""


def split_step(
    less: Any,
    whole: Any,
    chunks: Sequence[int],
    stages: int,
    batch: Collection[int],
    parameters: Collection[int],
    apart: bool = False,
) -> SplitStep:
    """Split the trace of a step into the parts of its stages.

    - `less`, `whole`: closed jaxprs of the step on one microbatch and on the whole batch, traced in segments.
    - `chunks`: number of the chunk of each segment.
    - `stages`: number of stages; chunk c is on stage c % stages.
    - `batch`, `parameters`: positions of the arguments that are cut into microbatches, and of the trained ones.
    - `apart`: True to put what no other microbatch's work waits for, gradients of weights, into parts of their own.

    Raises `UserError`, with the line, where the batch's result does not follow from those of its microbatches.
    """
    equations, results = flat_equations(less.jaxpr)
    others, other_results = flat_equations(whole.jaxpr)
    check_equations(equations, others)
    placed = _Placed(equations, results, less.jaxpr.invars, chunks)
    consts = set(less.jaxpr.constvars)
    parts = [
        _part(part, chunk, [equations[k] for k in members], consts)
        for (part, chunk), members in sorted(placed.members().items())
    ]
    if apart:
        parts = _with_weights_apart(parts, consts)
    if not batch:
        raise UserError(
            "no argument of the step is a batch that could be cut: name it by --roles, as in --roles x=batch."
        )
    inputs = [less.jaxpr.invars[position] for position in sorted(batch)]
    owners = {v: part.chunk % stages for part in reversed(parts) if part.part is Part.FORWARD for v in part.inputs}
    once = [equations[k] for k in placed.once()]
    for each in once:
        if any(is_var(v) and v in inputs for v in each.invars):
            raise UserError(f"an op outside of the segments' gradients uses the batch itself{_at(line_of(each))}.")
    check_constants(once, [others[k] for k in placed.once()], results, other_results)
    last = {v: part.chunk % stages for part in parts for v in _results(part.equations)}
    updates, owned = _by_stage(once, last | owners, consts)
    parts += updates
    owners = {v: owned.get(v, owners.get(v, 0)) for v in less.jaxpr.invars}
    wanted = {v for part in parts for v in part.inputs} | {v for v in results if is_var(v)}
    parts = [dataclasses.replace(part, outputs=tuple(v for v in part.outputs if v in wanted)) for part in parts]
    check_linear(equations, {id(eqn) for part in parts if part.part is Part.BACKWARD for eqn in part.equations})
    used = {v for part in updates for v in part.inputs} | {v for v in results if is_var(v)}
    made = {v: part.part for part in parts if part.part is not Part.UPDATE for v in part.outputs if v in used}
    summed = _relations(less, whole, others, placed, parts, made, sorted(batch), parameters)
    for each in once:
        for v in each.invars:
            if is_var(v) and v in summed and summed[v].kind is Reduction.EACH:
                raise UserError(
                    f"an op of the update uses rows of the batch{_at(line_of(each))}; compute it in a segment."
                )
    return SplitStep(less, tuple(parts), tuple(results), summed, owners)


class _Placed:
    """The rank of each equation: chunk c's forward part is c of C, its backward part 2C - 1 - c, the update 2C."""

    def __init__(self, equations: Sequence[Any], results: Sequence[Any], args: Collection[Any], chunks: Sequence[int]):
        """Rank all equations whose results are used."""
        self.equations, self.chunks = equations, chunks
        self.count = max(chunks) + 1
        self.ranks: list[int | None] = []
        self.maker: dict[Any, int] = {}
        self.args = set(args)
        self.homes = self._homes()
        for eqn in equations:
            behind = [self.maker[v] for v in eqn.invars if is_var(v) and v in self.maker]
            rank = self._rank(eqn, behind)
            self.ranks.append(rank)
            if rank is not None:
                self.maker.update(dict.fromkeys(eqn.outvars, rank))
        self._upwards({v for v in results if is_var(v)})

    def _homes(self) -> dict[Any, int]:
        """Return the first chunk in whose segments each argument is used."""
        homes: dict[Any, int] = {}
        for eqn in self.equations:
            if (number := segment_of(str(eqn.source_info.name_stack))) is not None:
                chunk = self.chunks[number]
                for v in eqn.invars:
                    if is_var(v) and v in self.args:
                        homes[v] = min(chunk, homes.get(v, chunk))
        return homes

    def _rank(self, eqn: Any, behind: Sequence[int]) -> int | None:
        """Return the rank that an equation's scope and the ranks of its operands give; None if neither gives one."""
        scope, last = str(eqn.source_info.name_stack), 2 * self.count - 1
        number = segment_of(scope)
        is_backward = "transpose(" in scope or "rematted" in scope
        if number is not None:
            chunk = self.chunks[number]
            return max([last - chunk if is_backward else chunk, *behind])
        if not behind and "jvp(" in scope and not is_backward:
            # A term of the loss that penalises a parameter belongs where the parameter is used.
            behind = [self.homes[v] for v in eqn.invars if is_var(v) and v in self.homes]
        if not behind:
            return None
        highest = max(behind)
        if is_backward:
            return max(highest, last - highest)
        if highest < self.count:
            for v in eqn.invars:
                if is_var(v) and v in self.args:
                    self.homes.setdefault(v, highest)
        return highest if highest < self.count or "jvp(" in scope and highest <= last else last + 1

    def _upwards(self, returned: Collection[Any]) -> None:
        """Rank the equations that use arguments alone by their first use; leave those without use at None."""
        users: dict[Any, list[int]] = defaultdict(list)
        for number in reversed(range(len(self.equations))):
            eqn = self.equations[number]
            if self.ranks[number] is None:
                using = [rank for v in eqn.outvars for rank in users[v]]
                if using or eqn.effects or not set(returned).isdisjoint(eqn.outvars):
                    self.ranks[number] = min(using, default=2 * self.count)
            if (rank := self.ranks[number]) is not None:
                for v in eqn.invars:
                    if is_var(v):
                        users[v].append(rank)

    def members(self) -> dict[tuple[Part, int], list[int]]:
        """Return the numbers of the equations of each forward and backward part, by part and chunk."""
        found: dict[tuple[Part, int], list[int]] = {(Part.FORWARD, chunk): [] for chunk in range(self.count)}
        for number, rank in enumerate(self.ranks):
            if rank is not None and rank < 2 * self.count:
                key = (Part.FORWARD, rank) if rank < self.count else (Part.BACKWARD, 2 * self.count - 1 - rank)
                found.setdefault(key, []).append(number)
        return found

    def once(self) -> list[int]:
        """Return the numbers of the equations of the update."""
        return [number for number, rank in enumerate(self.ranks) if rank == 2 * self.count]

    def is_forward(self, number: int) -> bool:
        """Return True if an equation belongs to a forward part."""
        rank = self.ranks[number]
        return rank is not None and rank < self.count


def _part(part: Part, chunk: int, equations: Sequence[Any], consts: Collection[Any]) -> StepPart:
    """Return a part with all its results as outputs; `consts` are variables of arrays that the trace captured."""
    made = _results(equations)
    inputs = dict.fromkeys(
        v for eqn in equations for v in eqn.invars if is_var(v) and v not in made and v not in consts
    )
    return StepPart(part, chunk, tuple(equations), tuple(inputs), tuple(made))


def _with_weights_apart(parts: Sequence[StepPart], consts: Collection[Any]) -> list[StepPart]:
    """Return the parts with each backward part in two: the work that other parts need, then the rest."""
    found: list[StepPart] = []
    for part in parts:
        if part.part is not Part.BACKWARD:
            found.append(part)
            continue
        needed = {v for other in parts if other is not part for v in other.inputs}
        first, last = [], []
        for eqn in reversed(part.equations):
            if needed.isdisjoint(eqn.outvars):
                last.append(eqn)
            else:
                first.append(eqn)
                needed.update(v for v in eqn.invars if is_var(v))
        found.append(_part(part.part, part.chunk, first[::-1], consts))
        if last:
            found.append(dataclasses.replace(_part(part.part, part.chunk, last[::-1], consts), weights=True))
    return found


def _results(equations: Sequence[Any]) -> dict[Any, None]:
    """Return the variables that equations compute, in order."""
    return dict.fromkeys(v for eqn in equations for v in eqn.outvars)


def _by_stage(
    equations: Sequence[Any], known: Mapping[Any, int], consts: Collection[Any]
) -> tuple[list[StepPart], dict[Any, int]]:
    """Return the parts of the update in an order that can be run, and the stage of each argument that only they use.

    - `known`: stage of arguments and of values of microbatches, by variable.
    - `consts`: variables of arrays that the trace captured.

    An equation runs on the stage of its largest operand with a stage, else on that of its first user. A stage has
    several parts if another stage needs a result between them, such as the norm of all gradients.
    """
    stage_of, stages = dict(known), list[int | None]()
    for eqn in equations:
        on = [v for v in eqn.invars if is_var(v) and v in stage_of]
        stage = stage_of[max(on, key=lambda v: v.aval.size)] if on else None
        stages.append(stage)
        if stage is not None:
            stage_of.update(dict.fromkeys(eqn.outvars, stage))
    owned: dict[Any, int] = {}
    for number in reversed(range(len(equations))):
        eqn = equations[number]
        own = stages[number]
        if own is None:
            own = stages[number] = next((owned[v] for v in eqn.outvars if v in owned), 0)
        owned.update((v, own) for v in eqn.invars if is_var(v) and v not in known)
    levels: dict[Any, tuple[int, int]] = {}
    members: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for eqn, stage in zip(equations, stages, strict=True):
        assert stage is not None
        before = [levels[v] for v in eqn.invars if is_var(v) and v in levels]
        level = max((at if on == stage else at + 1 for at, on in before), default=0)
        members[level, stage].append(eqn)
        levels.update(dict.fromkeys(eqn.outvars, (level, stage)))
    made = _results(equations)
    ordered = sorted(members.items(), key=lambda item: item[0])
    parts = [_part(Part.UPDATE, stage, each, consts) for (_, stage), each in ordered]
    return parts, {v: stage for v, stage in owned.items() if v not in made}


def _relations(
    less: Any,
    whole: Any,
    others: Sequence[Any],
    placed: _Placed,
    parts: Sequence[StepPart],
    made: Mapping[Any, Part],
    batch: Sequence[int],
    parameters: Collection[int],
) -> dict[Any, Relation]:
    """Return the relation of the values `made`, by part, of a microbatch to those of the batch.

    Values of forward parts are read from both traces, and scales of gradients from their constants. Raises `UserError`
    for values that do not follow from those of the microbatches.
    """
    equations = placed.equations
    if less.jaxpr.invars[batch[0]].aval.shape == whole.jaxpr.invars[batch[0]].aval.shape:
        return dict.fromkeys(made, Relation(Reduction.SUM, True))  # the only microbatch
    at = {v: (number, k) for number, eqn in enumerate(equations) for k, v in enumerate(eqn.outvars)}
    twin = {v: others[at[v][0]].outvars[at[v][1]] for v in made}
    forward = [number for number in range(len(equations)) if placed.is_forward(number)]
    values = [v for v, part in made.items() if part is Part.FORWARD]
    pairs = (
        _forward(whole, others, forward, [twin[v] for v in values]),
        _forward(less, equations, forward, values),
    )
    found = dict(zip(values, relations(*pairs, batch, parameters), strict=True))
    for v, relation in found.items():
        known = relation.kind in (Reduction.MEAN, Reduction.SUM, Reduction.CONST)
        in_order = relation.kind is Reduction.EACH and relation.place is not None and relation.place.outer == 1
        if not known and not in_order:
            why = "rows in another order than the batch" if relation.kind is Reduction.EACH else relation.why
            raise UserError(
                f"the result of the batch does not follow from those of its microbatches: it has "
                f"{why or 'no sum over examples'}{_at(relation.line or line_of(equations[at[v][0]]))}."
            )
    gradients = [v for v, part in made.items() if part is Part.BACKWARD]
    for v in gradients:
        if v.aval.shape != twin[v].aval.shape:
            line = _at(line_of(equations[at[v][0]]))
            raise UserError(f"a gradient has rows for single examples{line}: stages sum those of parameters alone.")
    if not gradients:
        return found
    backward = {v for part in parts if part.part is Part.BACKWARD for v in part.inputs}
    saved = [v for part in parts if part.part is Part.FORWARD for v in part.outputs if v in backward]
    pairs = (
        _forward(whole, others, forward, [others[at[v][0]].outvars[at[v][1]] for v in saved]),
        _forward(less, equations, forward, saved),
    )
    for v, relation in zip(saved, relations(*pairs, batch, parameters), strict=True):
        if relation.kind not in (Reduction.EACH, Reduction.CONST):
            line = _at(relation.line or line_of(equations[at[v][0]]))
            raise UserError(f"a gradient needs a value of the whole batch{line}: microbatches do not have it.")
    rows = whole.jaxpr.invars[batch[0]].aval.shape[0] // less.jaxpr.invars[batch[0]].aval.shape[0]
    scales = Scales(equations, others, [less.jaxpr.invars[position] for position in batch], rows)
    for v in gradients:
        mean = scales.is_mean(v)
        if mean is None:
            line = _at(line_of(equations[at[v][0]]))
            raise UserError(f"a gradient is neither a mean nor a sum over examples{line}: return it by one of them.")
        found[v] = Relation(Reduction.MEAN if mean else Reduction.SUM, True)
    return found


def _forward(closed: Any, equations: Sequence[Any], numbers: Sequence[int], results: Sequence[Any]) -> Any:
    """Return a closed jaxpr of some equations, with `results` as results."""
    return closed_jaxpr(closed, [equations[number] for number in numbers], closed.jaxpr.invars, results)


def closed_jaxpr(closed: Any, equations: Sequence[Any], inputs: Sequence[Any], results: Sequence[Any]) -> Any:
    """Return a closed jaxpr of equations of another one, with the constants of that."""
    import jax.extend.core as jex

    jaxpr = closed.jaxpr
    effects = frozenset(effect for eqn in equations for effect in eqn.effects)
    own = jaxpr.replace(
        invars=list(inputs),
        eqns=list(equations),
        outvars=list(results),
        effects=effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.ClosedJaxpr(own, closed.consts)


def _at(line: str) -> str:
    """Return a line of code in words, with a space before; empty if it is unknown."""
    return f" at {line}" if line else ""
