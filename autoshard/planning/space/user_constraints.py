"""Demands of the user: specs by name or pattern, axes barred from tensors, and axes restricted to dim groups.

A pattern is a name as reports print it, with shell wildcards (`*`, `?`, `[a-z]`), whole or from any dot on. The dims of
a pin are counted from the right. A stack of layers has one more dim in front, which stays whole and is not written.
"""

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh
from autoshard.errors import PinError, UserError
from autoshard.planning.record.spec import Spec, parse_spec_text
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.planning.space.spec_constraints import Demand, allowed_states, checked_dims, mesh_text
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import Role


FREE = "?"
"""Entry of a pin for a dim that the solver decides."""
REST = "..."
"""Last entry of a pin after which all dims are whole, as after the last entry of a `PartitionSpec`."""

_NOTHING = ("", "-", "none")
"""Entries of a pin, in lower case, for a whole dim."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """Pin of one pattern; `dims` are counted from the right, and None leaves a dim free."""

    pattern: str
    dims: tuple[tuple[str, ...] | None, ...]
    """Names of the axes that split each dim; `()` for a whole dim."""
    flag: str
    """The pin as an option of the command line, such as `--pin *.weight=model,None`."""
    sizes: tuple[int | None, ...] | None = None
    """Sizes of the dims if the pin states them, else None; None for a dim whose size is `*`."""
    more: bool = False
    """True if the tensor may have further dims after these, which stay whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """All demands of the user, in order."""

    pins: tuple[Pinned, ...] = ()
    replicate: tuple[str, ...] = ()
    """Patterns of tensors that stay whole."""
    forbid: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Pattern, and the axes that may not split its tensors."""
    axis_only: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Axis, and the names of the dim groups that it may split."""

    def __bool__(self) -> bool:
        """Return True if there is a demand."""
        return bool(self.pins or self.replicate or self.forbid or self.axis_only)

    @property
    def lines(self) -> list[str]:
        """Demands as options of the command line."""
        lines = [pin.flag for pin in self.pins]
        lines += [f"--replicate {pattern}" for pattern in self.replicate]
        lines += [f"--forbid {pattern}={','.join(axes)}" for pattern, axes in self.forbid]
        return lines + [f"--axis-only {axis}={','.join(names)}" for axis, names in self.axis_only]


@dataclasses.dataclass(frozen=True, slots=True)
class Required:
    """Demands of the user, applied to one model."""

    allowed: dict[int, NDArray[np.bool_]]
    """Mask of the alternatives that satisfy all demands, by node."""
    pinned: dict[str, str]
    """Origins of the demands, as options, for every argument and result with one, by name; not of `axis_only`."""

    def holds(self, choices: NDArray[np.int64]) -> bool:
        """Return True if choices, [nodes of the model], satisfy all demands."""
        return all(bool(mask[int(choices[node])]) for node, mask in self.allowed.items())


def read_asked(
    pins: Mapping[str, Any] | None = None,
    replicate: Iterable[str] | str | None = None,
    forbid: Mapping[str, Any] | None = None,
    axis_only: Mapping[str, Any] | None = None,
    pin_from: Mapping[str, Spec] | None = None,
) -> Asked:
    """Read the demands of a user: texts, `Spec`, `PartitionSpec`, or sequences with an entry for each dim.

    Raises `UserError` for unreadable input.

    Demands that are None are absent. Pins of another plan follow the user's.

    - `pins`: spec by pattern.
    - `replicate`: patterns of tensors that stay whole.
    - `forbid`: axes that may not split the tensors of a pattern.
    - `axis_only`: dim groups that an axis may split, by axis.
    - `pin_from`: specs of another plan by exact name.
    """
    pinned = [_pinned(pattern, spec) for pattern, spec in _pairs_of("pins", pins, "'*.weight': 'model,None'")]
    pinned += [_pinned(name, spec) for name, spec in (pin_from or {}).items()]
    return Asked(
        tuple(pinned),
        () if replicate is None else _names("replicate", replicate, "names of tensors", whole=True),
        tuple(
            (pattern, _names(f"forbid of `{pattern}`", axes, "axes"))
            for pattern, axes in _pairs_of("forbid", forbid, "'*.embed*': 'data'")
        ),
        tuple(
            (axis, _names(f"axis_only of `{axis}`", groups, "dim groups"))
            for axis, groups in _pairs_of("axis_only", axis_only, "'data': 'batch'")
        ),
    )


def _pairs_of(option: str, value: Any, example: str) -> list[tuple[str, Any]]:
    """Return the items of a mapping from names, none for None. Raises `UserError` for anything else.

    `option` and `example` stand in the message.
    """
    if value is None:
        return []
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{option} is {value!r}; write a dict with names, such as {{{example}}}.")
    return list(value.items())


def _names(where: str, value: Any, what: str, whole: bool = False) -> tuple[str, ...]:
    """Return the names in a text or in a sequence, stripped and without empty ones. Raises `UserError` for others.

    - `where`: option, for the message.
    - `value`: the text or sequence; commas separate the names in a text.
    - `what`: kind of names, for the message.
    - `whole`: True if a text is one name, commas included.
    """
    parts = ([value] if whole else value.split(",")) if isinstance(value, str) else value
    if isinstance(parts, bytes) or not isinstance(parts, Iterable):
        raise UserError(f"{where} is {value!r}; write {what}, as a text or in a list.")
    names: list[str] = []
    for part in parts:
        if not isinstance(part, str):
            raise UserError(f"{where} has {part!r} among its {what}; write them as texts.")
        names.append(part.strip())
    return tuple(name for name in names if name)


def _pinned(pattern: str, spec: Any) -> Pinned:
    """Read one pin from any of its forms; raise `UserError` for others.

    The forms are the text of a report (`4096/data x 14336`), a text with entries between commas, a `Spec`, a
    `PartitionSpec`, or a sequence of entries. A final `...` sets `more`, as a `PartitionSpec` does.
    """
    sized = parse_spec_text(spec) if isinstance(spec, str) else None
    if sized is not None:
        axes, sizes = tuple(axes for _, axes in sized), tuple(size for size, _ in sized)
        return Pinned(pattern, axes, f"--pin {pattern}={spec.strip()}", sizes)
    if isinstance(spec, Spec):
        spec = spec.dims
    entries = spec.strip().strip("[]()").split(",") if isinstance(spec, str) else spec
    if not isinstance(entries, Iterable) or isinstance(entries, bytes | Mapping):
        raise _unreadable(pattern, spec)
    entries = [entry.strip() if isinstance(entry, str) else entry for entry in entries]
    # A JAX `PartitionSpec` may omit dims after the last split one. Newer versions name the class `P`.
    more = hasattr(type(spec), "UNCONSTRAINED")
    if entries and (entries[-1] is ... or entries[-1] == REST):
        more = bool(entries.pop())
    dims = tuple(_entry(pattern, spec, entry) for entry in entries)
    shown = ["?" if axes is None else "+".join(axes) or "None" for axes in dims] + [REST] * more
    return Pinned(pattern, dims, f"--pin {pattern}={','.join(shown)}", more=more)


def _entry(pattern: str, spec: Any, entry: Any) -> tuple[str, ...] | None:
    """Read the axes of one dim of a pin: `()` for a whole dim, None for a free dim (`?`, or JAX's `UNCONSTRAINED`).

    The entry is None, a text whose axes `+` joins, or a sequence of names. Raises `UserError` for others, which names
    `pattern` and the whole `spec`.
    """
    if entry is None:
        return ()
    if isinstance(entry, str):
        if entry == FREE:
            return None
        return () if entry.lower() in _NOTHING else tuple(part.strip() for part in entry.split("+"))
    if isinstance(entry, list | tuple) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    if entry is getattr(type(spec), "UNCONSTRAINED", FREE):
        return None
    raise _unreadable(pattern, spec)


def _unreadable(pattern: str, spec: Any) -> UserError:
    """Return the error for a pin of an unknown form."""
    return UserError(
        f"the pin of `{pattern}` is {spec!r}; write it as reports do ('4096/data x 14336'), or an entry for each "
        "dim, as 'model,None': `+` joins axes of one dim, `?` leaves a dim free, and a final `...` leaves all further "
        "dims whole."
    )


_PAIRS = {"--pin": "pins", "--forbid": "forbid", "--axis-only": "axis_only"}
"""Option of `read_asked` for every flag whose text is a name and a value."""


def parse_lines(lines: Iterable[str]) -> Asked:
    """Parse the output of `Asked.lines`; lines with other flags are ignored.

    Raises `UserError` for unreadable demands, such as a line without `=` that needs one.
    """
    asked = Asked()
    for line in lines:
        flag, _, text = line.partition(" ")
        name, equals, value = text.partition("=")
        if flag in _PAIRS and not equals:
            raise UserError(f"{line} has no `=`; write {flag} NAME=VALUE.")
        pair: dict[str, Any] = {_PAIRS[flag]: {name: value}} if flag in _PAIRS else {}
        more = read_asked(replicate=[text] if flag == "--replicate" else None, **pair)
        asked = Asked(
            asked.pins + more.pins,
            asked.replicate + more.replicate,
            asked.forbid + more.forbid,
            asked.axis_only + more.axis_only,
        )
    return asked


# Application to a model


def require(model: Model, groups: Groups, asked: Asked) -> Required:
    """Return the alternatives of a model that satisfy all demands: pins, whole tensors, barred axes, then dim groups.

    Raises `UserError` in these cases:

    - a name matches nothing;
    - an axis or a dim group does not exist;
    - a spec is impossible, alone or in combination with another.
    """
    all_demands = _Requirements(model, groups)
    for pin in asked.pins:
        for name, tensor in all_demands.matching(pin.pattern, pin.flag):
            all_demands.add(name, all_demands.pin(pin, name, tensor))
    whole = [(pattern, (), False, f"--replicate {pattern}") for pattern in asked.replicate]
    barred = [(pattern, axes, True, f"--forbid {pattern}={','.join(axes)}") for pattern, axes in asked.forbid]
    for pattern, axes, is_open, option in (*whole, *barred):
        for name, tensor in all_demands.matching(pattern, option):
            rank = len(model.graph.tensors[tensor].shape)
            barred_axes = all_demands.axes(axes, option)
            all_demands.add(name, Demand(tensor, ((),) * rank, (is_open,) * rank, barred_axes, option))
    for axis, names in asked.axis_only:
        all_demands.keep_axis(axis, names)
    return Required(all_demands.allowed, all_demands.pinned)


def require_lines(model: Model, groups: Groups, lines: Iterable[str]) -> Required:
    """Return `require` for the demands that a plan stores as lines (`Asked.lines`); raise `UserError` as it does."""
    return require(model, groups, parse_lines(lines))


def check_axes(asked: Asked, mesh: Mesh) -> None:
    """Raise `UserError` for a demand that names an axis which the mesh does not have; this needs no model."""
    for pin in asked.pins:
        _known_axes([axis for axes in pin.dims for axis in axes or ()], pin.flag, mesh)
    for pattern, axes in asked.forbid:
        _known_axes(axes, f"--forbid {pattern}={','.join(axes)}", mesh)
    for axis, names in asked.axis_only:
        _known_axes([axis], f"--axis-only {axis}={','.join(names)}", mesh)


def _known_axes(names: Iterable[str], flag: str, mesh: Mesh) -> tuple[int, ...]:
    """Convert names of axes to numbers. Raises `UserError` with `flag` for an axis that the mesh does not have."""
    for name in names:
        if name not in mesh.names:
            raise UserError(
                f"{flag} names the axis `{name}`, but the mesh has {mesh_text(mesh)}: use one of these, or another "
                "--mesh."
            )
    return tuple(mesh.names.index(name) for name in names)


class _Requirements:
    """Demands of the user in the course of their application to a model.

    `allowed` and `pinned` become the fields of `Required`. `demands` has those applied so far, by node.
    """

    def __init__(self, model: Model, groups: Groups) -> None:
        """Index the tensors and shapes of arguments and results by name; an argument hides a result of its name."""
        self.model, self.groups = model, groups
        self.allowed: dict[int, NDArray[np.bool_]] = {}
        self.pinned: dict[str, str] = {}
        self.demands: dict[int, list[tuple[str, Demand]]] = {}
        program, graph = model.program, model.graph
        self.tensors = {a.name: t for a, t in zip(program.arguments, graph.arguments, strict=True)}
        self.state = {a.name for a in program.arguments if a.role is Role.OPTIMIZER_STATE}
        for result, tensor in zip(program.results, graph.results, strict=True):
            self.tensors.setdefault(result.name, tensor)
        self.shapes = {value.name: value.shape for value in (*program.results, *program.arguments)}

    def matching(self, pattern: str, flag: str) -> list[tuple[str, int]]:
        """Return the names and tensors that a pattern matches; raise `UserError` with `flag` if there is none.

        An exact name matches alone, else whole names match, else names from any dot on. In the last case optimizer
        state is left out if anything else matches.
        """
        matches = [pattern] if pattern in self.tensors else []  # the name of a stack contains a `*`
        matches = matches or [name for name in self.tensors if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            matches = [n for n in self.tensors if fnmatch.fnmatchcase(n, f"*.{pattern}")]
            matches = [n for n in matches if n not in self.state] or matches
        if not matches:
            raise UserError(f"{flag} matches no argument or result of the program; {near_names(pattern, self.tensors)}")
        return [(name, self.tensors[name]) for name in matches]

    def axes(self, names: Iterable[str], flag: str) -> tuple[int, ...]:
        """Convert names of axes to numbers; raise `UserError` with `flag` for an axis that the mesh lacks."""
        return _known_axes(names, flag, self.model.mesh)

    def pin(self, pin: Pinned, name: str, tensor: int) -> Demand:
        """Return the demand of a pin on one tensor. Raises `UserError` if the dims or their sizes do not match.

        Leading dims of a stack that the pin leaves out stay whole.

        - `pin`: the pin, counted from the right.
        - `name`: name of the argument or result.
        - `tensor`: its number in the graph.
        """
        shape = self.shapes[name]
        stacked = min(self.stacked(name, tensor), len(shape))
        rest = max(0, len(shape) - stacked - len(pin.dims)) if pin.more else 0
        missing = len(shape) - len(pin.dims) - rest
        if missing < 0 or missing > stacked:
            more = f" after the {stacked} of the stack of layers" if stacked else ""
            hint = f" `--replicate '{pin.pattern}'` keeps tensors of any rank whole." if set(pin.dims) <= {()} else ""
            many = "entry" if len(pin.dims) == 1 else "entries"
            dims = "dim" if len(shape) - stacked == 1 else "dims"
            raise UserError(
                f"{pin.flag} has {len(pin.dims)} {many}, but {name} of shape {list(shape)} has {len(shape) - stacked} "
                f"{dims}{more}: write an entry for each: None for a whole dim, ? for a free one, or a final ... if all "
                f"further dims are whole.{hint}"
            )
        for size, own in zip(pin.sizes or (), shape[missing:], strict=False):
            if size not in (None, own):
                raise UserError(
                    f"{pin.flag} is for a dim of {size}, but {name} of shape {list(shape)} has {own} there: write its "
                    "own sizes, or * for any."
                )
        words = len(self.model.graph.tensors[tensor].shape) - len(shape)
        entries = ((),) * missing + pin.dims + ((),) * rest
        dims = tuple(() if entry is None else self.axes(entry, pin.flag) for entry in entries)
        dims = checked_dims(f"{pin.flag} ({name})", shape, dims, self.model.mesh)
        is_open = tuple(entry is None for entry in entries)
        return Demand(tensor, (*dims, *((),) * words), (*is_open, *(False,) * words), (), pin.flag)

    def stacked(self, name: str, tensor: int) -> int:
        """Return the number of leading dims that no axis may split, as those that stack layers; 0 for a scalar."""
        structure = self.model.structure
        cluster, factors = structure.cluster_of[tensor], structure.dims_of[tensor]
        if cluster < 0:
            return 0
        blocked = structure.clusters[cluster].blocked
        count = 0
        while count < len(factors) and factors[count] in blocked:
            count += 1
        return count

    def add(self, name: str, demand: Demand) -> None:
        """Restrict the tensor's cluster to a demand, and record its origin for `name`.

        Raises `PinError` if no state satisfies all demands so far, or if a tensor without a cluster would be split.
        """
        structure = self.model.structure
        self.pinned[name] = demand.why if name not in self.pinned else f"{self.pinned[name]} {demand.why}"
        cluster = structure.cluster_of[demand.tensor]
        if cluster < 0:
            if any(demand.dims):
                why = f"{name} is a constant or of one element, which stays whole"
                raise PinError(f"{demand.why} cannot hold: {why}.", (name,))
            return
        node = self.model.cluster_node[cluster]
        states = self.model.nodes[node].states
        mask = allowed_states(structure, states, demand)
        if not mask.any():
            raise PinError(f"{demand.why} cannot hold for {name}: {self.obstacle(cluster, demand)}.", (name,))
        combined = mask & self.allowed.get(node, np.ones(len(states), dtype=bool))
        if not combined.any():
            other, earlier = next(
                ((n, d) for n, d in self.demands[node] if not (mask & allowed_states(structure, states, d)).any()),
                self.demands[node][0],
            )
            shared_spec = "" if other == name else f", since {name} and {other} share one spec"
            sentence = f"{demand.why} contradicts {earlier.why}{shared_spec}: leave one of them out."
            raise PinError(sentence, (name, other))
        self.demands.setdefault(node, []).append((name, demand))
        self.allowed[node] = combined

    def obstacle(self, cluster: int, demand: Demand) -> str:
        """Explain in a clause why no alternative of a cluster satisfies a demand, for an error message."""
        structure, graph = self.model.structure, self.model.graph
        whole = structure.clusters[cluster].blocked
        for dim, (factor, axes) in enumerate(zip(structure.dims_of[demand.tensor], demand.dims, strict=True)):
            if axes and factor in whole:
                return f"dim {dim} of {list(graph.tensors[demand.tensor].shape)} stays whole (a stack, or cut by an op)"
        own = [c.where for c in graph.constraints if structure.cluster_of[c.tensor] == cluster]
        if own:
            return f"{own[0]} in the program asks for another spec"
        return "a tensor that shares its spec cannot be split so"

    def keep_axis(self, axis: str, names: Sequence[str]) -> None:
        """Restrict an axis to dims of the named groups, or to no dim, in every decision.

        Raises `UserError` for an unknown axis or group, and if a decision has no alternative left. Without names the
        axis splits nothing.
        """
        option = f"--axis-only {axis}={','.join(names)}"
        (number,) = self.axes([axis], option)
        known = {name for name in self.groups.names.values() if name}
        for name in names:
            if name not in known:
                raise UserError(f"{option} names no dim group of the program; it has {', '.join(sorted(known))}.")
        wanted = {group for group, name in self.groups.names.items() if name in names}
        for position, node in enumerate(self.model.nodes):
            if node.kind == "cluster":
                group_of = [self.groups.of_factor.get((node.ref, f)) for f in range(_width(node.states))]
            elif node.kind == "copy":
                group_of = tensor_groups(self.model.structure, self.groups.of_factor, node.ref)
            else:
                group_of = self.op_groups(node.ref, _width(node.states))
            allowed_factors = [f for f, group in enumerate(group_of) if group in wanted]
            mask = np.isin(node.states[:, number], [WHOLE, *allowed_factors])
            mask &= self.allowed.get(position, mask)
            if not mask.any():
                earlier = self.demands.get(position)
                why = f"contradicts {earlier[0][1].why}" if earlier else f"cannot hold for {node.name}"
                raise UserError(f"{option} {why}: leave one of them out.")
            self.allowed[position] = mask

    def op_groups(self, op_id: int, width: int) -> list[int | None]:
        """Return the dim group of each of the first `width` factors of an op, as its tensors have it; None without one.

        In a merged dim the first factor has the group.
        """
        op, structure = self.model.graph.ops[op_id], self.model.structure
        group_of: list[int | None] = [None] * width
        if op.rule is None:
            return group_of
        for tensors, sides in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
            for tensor, dims in zip(tensors, sides, strict=True):
                if structure.cluster_of[tensor] < 0:
                    continue
                dim_groups = tensor_groups(structure, self.groups.of_factor, tensor)
                for group, factors in zip(dim_groups, dims, strict=True):
                    if factors and factors[0] < width and group is not None:
                        group_of[factors[0]] = group
        return group_of


def _width(states: NDArray[np.int64]) -> int:
    """Return one more than the largest factor that any state splits; 0 if none is split."""
    return int(states.max(initial=-1)) + 1


def near_names(text: str, names: Iterable[str]) -> str:
    """Return `did you mean a, b?` with up to three similar names, else `it has a, b ...` with the first five names."""
    listed = list(names)
    bare = text.replace("*", "").replace("?", "")
    near = difflib.get_close_matches(text, listed, n=3, cutoff=0.5) or difflib.get_close_matches(bare, listed, n=3)
    if not near:
        words = [w for w in re.split(r"[.*?\[\]]+", text) if len(w) > 2]
        near = [name for name in listed if any(word in name for word in words)][:3]
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"it has {', '.join(listed[:5])}{' ...' if len(listed) > 5 else ''}."
