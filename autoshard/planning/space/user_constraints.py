"""What whoever plans asks for: specs by name or pattern, axes kept from tensors, axes kept to dim groups.

A pattern is the name that reports print, with shell wildcards (`*`, `?`, `[a-z]`), whole or from any dot on. The dims
of a pin are counted from the right: a stack of layers has one more dim in front, which stays whole and is not written.
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
from autoshard.errors import UserError
from autoshard.planning.record.spec import Spec, parse_spec_text
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.planning.space.spec_constraints import Demand, allowed_states, checked_dims, mesh_text
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import Role


FREE = "?"
"""A dim that a pin leaves to the solver."""
REST = "..."
"""The last entry of a pin after which all dims are whole, as they are after the last entry of a `PartitionSpec`."""

_NOTHING = ("", "-", "none")


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """One pin: dims counted from the right; None leaves a dim free."""

    pattern: str
    dims: tuple[tuple[str, ...] | None, ...]
    said: str
    sizes: tuple[int | None, ...] | None = None
    """Sizes of the dims where they were written too, None for one that was not."""
    more: bool = False
    """True if the tensor may have more dims behind these, which stay whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """Everything that is asked for, in order."""

    pins: tuple[Pinned, ...] = ()
    replicate: tuple[str, ...] = ()
    forbid: tuple[tuple[str, tuple[str, ...]], ...] = ()
    axis_only: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pins or self.replicate or self.forbid or self.axis_only)

    @property
    def lines(self) -> list[str]:
        """As the command would take it."""
        lines = [pin.said for pin in self.pins]
        lines += [f"--replicate {pattern}" for pattern in self.replicate]
        lines += [f"--forbid {pattern}={','.join(axes)}" for pattern, axes in self.forbid]
        return lines + [f"--axis-only {axis}={','.join(names)}" for axis, names in self.axis_only]


@dataclasses.dataclass(frozen=True, slots=True)
class Required:
    """What was asked for, on one model."""

    allowed: dict[int, NDArray[np.bool_]]
    """Node -> alternatives that keep all of it."""
    pinned: dict[str, str]
    """Name of every argument and result that is fixed in some way -> who asked for it."""

    def holds(self, choices: NDArray[np.int64]) -> bool:
        return all(bool(mask[int(choices[node])]) for node, mask in self.allowed.items())


def read_asked(
    pins: Mapping[str, Any] | None = None,
    replicate: Iterable[str] | str | None = None,
    forbid: Mapping[str, Any] | None = None,
    axis_only: Mapping[str, Any] | None = None,
    pin_from: Mapping[str, Spec] | None = None,
) -> Asked:
    """The record, from what users write: text, `Spec`, `PartitionSpec`, or a sequence with an entry for each dim.

    `pin_from` are specs of another plan, by exact name. Raises `UserError` for what cannot be read.
    """
    found = [_pinned(pattern, spec) for pattern, spec in _pairs_of("pins", pins, "'*.weight': 'model,None'")]
    found += [_pinned(name, spec) for name, spec in (pin_from or {}).items()]
    return Asked(
        tuple(found),
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
    """Return the items of a mapping from names. Raises `UserError` for anything else."""
    if value is None:
        return []
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{option} is {value!r}; write a dict with names, such as {{{example}}}.")
    return list(value.items())


def _names(where: str, value: Any, what: str, whole: bool = False) -> tuple[str, ...]:
    """Return the names in a text, where they have commas between them unless it is `whole` one name, or in a sequence.

    Raises `UserError` for anything else.
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
    # JAX names no dims behind the last one that is split. Its class is called `P` in newer versions.
    more = hasattr(type(spec), "UNCONSTRAINED")
    if entries and (entries[-1] is ... or entries[-1] == REST):
        more = bool(entries.pop())
    dims = tuple(_entry(pattern, spec, entry) for entry in entries)
    shown = ["?" if axes is None else "+".join(axes) or "None" for axes in dims] + [REST] * more
    return Pinned(pattern, dims, f"--pin {pattern}={','.join(shown)}", more=more)


def _entry(pattern: str, spec: Any, entry: Any) -> tuple[str, ...] | None:
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
    return UserError(
        f"the pin of `{pattern}` is {spec!r}; write it as reports do ('4096/data x 14336'), or an entry for each "
        "dim, such as 'model,None', with `+` between axes that split one dim, `?` for a dim that is left free, and "
        "`...` at the end where all further dims are whole."
    )


def parse_lines(lines: Iterable[str]) -> Asked:
    """What `Asked.lines` wrote."""
    flags: dict[str, list[str]] = {}
    for line in lines:
        flag, _, rest = line.partition(" ")
        flags.setdefault(flag, []).append(rest)
    pairs = {flag: dict(text.split("=", 1) for text in flags.get(flag, [])) for flag in _PAIRS}
    return read_asked(pairs["--pin"], flags.get("--replicate"), pairs["--forbid"], pairs["--axis-only"])


_PAIRS = ("--pin", "--forbid", "--axis-only")


# On a model


def require(model: Model, groups: Groups, asked: Asked) -> Required:
    """The alternatives that keep everything asked for.

    Raises `UserError` for a name that matches nothing, an axis or a dim group that does not exist, and a spec that
    cannot hold, alone or beside another.
    """
    made = _Requirements(model, groups)
    for pin in asked.pins:
        for name, tensor in made.matching(pin.pattern, pin.said):
            made.add(name, made.pin(pin, name, tensor))
    for pattern in asked.replicate:
        said = f"--replicate {pattern}"
        for name, tensor in made.matching(pattern, said):
            rank = len(model.graph.tensors[tensor].shape)
            made.add(name, Demand(tensor, ((),) * rank, (False,) * rank, (), said))
    for pattern, axes in asked.forbid:
        said = f"--forbid {pattern}={','.join(axes)}"
        for name, tensor in made.matching(pattern, said):
            rank = len(model.graph.tensors[tensor].shape)
            made.add(name, Demand(tensor, ((),) * rank, (True,) * rank, made.axes(axes, said), said))
    for axis, names in asked.axis_only:
        made.keep_axis(axis, names)
    return Required(made.allowed, made.pinned)


def require_lines(model: Model, groups: Groups, lines: Iterable[str]) -> Required:
    """The same from the lines that a plan keeps."""
    return require(model, groups, parse_lines(lines))


def check_axes(asked: Asked, mesh: Mesh) -> None:
    """Refuse an axis that the mesh does not have, before there is a model."""
    for pin in asked.pins:
        _known_axes([axis for axes in pin.dims for axis in axes or ()], pin.said, mesh)
    for pattern, axes in asked.forbid:
        _known_axes(axes, f"--forbid {pattern}={','.join(axes)}", mesh)
    for axis, names in asked.axis_only:
        _known_axes([axis], f"--axis-only {axis}={','.join(names)}", mesh)


def _known_axes(names: Iterable[str], said: str, mesh: Mesh) -> tuple[int, ...]:
    """Axes by number. Raises `UserError` for one that the mesh does not have."""
    for name in names:
        if name not in mesh.names:
            raise UserError(
                f"{said} names the axis `{name}`, but the mesh has {mesh_text(mesh)}: use one of these, or another "
                "--mesh."
            )
    return tuple(mesh.names.index(name) for name in names)


class _Requirements:
    def __init__(self, model: Model, groups: Groups) -> None:
        self.model, self.groups = model, groups
        self.allowed: dict[int, NDArray[np.bool_]] = {}
        self.pinned: dict[str, str] = {}
        self.made: dict[int, list[tuple[str, Demand]]] = {}
        program, graph = model.program, model.graph
        self.tensors = {a.name: t for a, t in zip(program.arguments, graph.arguments, strict=True)}
        self.state = {a.name for a in program.arguments if a.role is Role.OPTIMIZER_STATE}
        for result, tensor in zip(program.results, graph.results, strict=True):
            self.tensors.setdefault(result.name, tensor)
        self.shapes = {value.name: value.shape for value in (*program.results, *program.arguments)}

    def matching(self, pattern: str, said: str) -> list[tuple[str, int]]:
        """Named tensors that a pattern means; a part of a name does not mean the optimizer state of a parameter."""
        found = [pattern] if pattern in self.tensors else []  # the name of a stack has a `*` of its own
        found = found or [name for name in self.tensors if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            found = [n for n in self.tensors if fnmatch.fnmatchcase(n, f"*.{pattern}")]
            found = [n for n in found if n not in self.state] or found
        if not found:
            raise UserError(f"{said} matches no argument or result of the program; {near_names(pattern, self.tensors)}")
        return [(name, self.tensors[name]) for name in found]

    def axes(self, names: Iterable[str], said: str) -> tuple[int, ...]:
        return _known_axes(names, said, self.model.mesh)

    def pin(self, pin: Pinned, name: str, tensor: int) -> Demand:
        shape = self.shapes[name]
        stacked = min(self.stacked(name, tensor), len(shape))
        rest = max(0, len(shape) - stacked - len(pin.dims)) if pin.more else 0
        missing = len(shape) - len(pin.dims) - rest
        if missing < 0 or missing > stacked:
            more = f" after the {stacked} of the stack of layers" if stacked else ""
            raise UserError(
                f"{pin.said} has {len(pin.dims)} dims, but {name} of shape {list(shape)} has {len(shape) - stacked}"
                f"{more}: write an entry for each, None for a whole dim, ? for one that is left free, or ... for all "
                "further dims, which are whole."
            )
        for size, own in zip(pin.sizes or (), shape[missing:], strict=False):
            if size not in (None, own):
                raise UserError(
                    f"{pin.said} is for a dim of {size}, but {name} of shape {list(shape)} has {own} there: write its "
                    "own sizes, or * for any."
                )
        words = len(self.model.graph.tensors[tensor].shape) - len(shape)
        entries = ((),) * missing + pin.dims + ((),) * rest
        dims = tuple(() if entry is None else self.axes(entry, pin.said) for entry in entries)
        dims = checked_dims(f"{pin.said} ({name})", shape, dims, self.model.mesh)
        is_open = tuple(entry is None for entry in entries)
        return Demand(tensor, (*dims, *((),) * words), (*is_open, *(False,) * words), (), pin.said)

    def stacked(self, name: str, tensor: int) -> int:
        """How many leading dims are stacks of layers, which no axis splits."""
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
        structure = self.model.structure
        self.pinned[name] = demand.why if name not in self.pinned else f"{self.pinned[name]} {demand.why}"
        cluster = structure.cluster_of[demand.tensor]
        if cluster < 0:
            if any(demand.dims):
                raise UserError(f"{demand.why} cannot hold: {name} is a constant or of one element, which stays whole.")
            return
        node = self.model.cluster_node[cluster]
        states = self.model.nodes[node].states
        mask = allowed_states(structure, states, demand)
        if not mask.any():
            raise UserError(f"{demand.why} cannot hold for {name}: {self.obstacle(cluster, demand)}.")
        together = mask & self.allowed.get(node, np.ones(len(states), dtype=bool))
        if not together.any():
            other, earlier = next(
                ((n, d) for n, d in self.made[node] if not (mask & allowed_states(structure, states, d)).any()),
                self.made[node][0],
            )
            same = "" if other == name else f", since {name} and {other} share one spec"
            raise UserError(f"{demand.why} contradicts {earlier.why}{same}: leave one of them out.")
        self.made.setdefault(node, []).append((name, demand))
        self.allowed[node] = together

    def obstacle(self, cluster: int, demand: Demand) -> str:
        """Why no alternative of a cluster keeps a demand."""
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
        """Only dims of the named groups may be split by an axis, in every decision."""
        said = f"--axis-only {axis}={','.join(names)}"
        (number,) = self.axes([axis], said)
        known = {name for name in self.groups.names.values() if name}
        for name in names:
            if name not in known:
                raise UserError(f"{said} names no dim group of the program; {near_names(name, sorted(known))}")
        wanted = {group for group, name in self.groups.names.items() if name in names}
        for position, node in enumerate(self.model.nodes):
            if node.kind == "cluster":
                of = [self.groups.of_factor.get((node.ref, f)) for f in range(_width(node.states))]
            elif node.kind == "copy":
                of = tensor_groups(self.model.structure, self.groups.of_factor, node.ref)
            else:
                of = self.op_groups(node.ref, _width(node.states))
            kept = [f for f, group in enumerate(of) if group in wanted]
            mask = np.isin(node.states[:, number], [WHOLE, *kept])
            mask &= self.allowed.get(position, mask)
            if not mask.any():
                earlier = self.made.get(position)
                why = f"contradicts {earlier[0][1].why}" if earlier else f"cannot hold for {node.name}"
                raise UserError(f"{said} {why}: leave one of them out.")
            self.allowed[position] = mask

    def op_groups(self, op_id: int, width: int) -> list[int | None]:
        """The dim group of each factor of an op, by the tensors whose dims it is."""
        op, structure = self.model.graph.ops[op_id], self.model.structure
        found: list[int | None] = [None] * width
        if op.rule is None:
            return found
        for tensors, sides in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
            for tensor, dims in zip(tensors, sides, strict=True):
                if structure.cluster_of[tensor] < 0:
                    continue
                of = tensor_groups(structure, self.groups.of_factor, tensor)
                for group, factors in zip(of, dims, strict=True):
                    if factors and factors[0] < width and group is not None:
                        found[factors[0]] = group
        return found


def _width(states: NDArray[np.int64]) -> int:
    return int(states.max(initial=-1)) + 1


def near_names(text: str, names: Iterable[str]) -> str:
    """`did you mean a, b?`, or what there is."""
    listed = list(names)
    bare = text.replace("*", "").replace("?", "")
    near = difflib.get_close_matches(text, listed, n=3, cutoff=0.5) or difflib.get_close_matches(bare, listed, n=3)
    if not near:
        words = [w for w in re.split(r"[.*?\[\]]+", text) if len(w) > 2]
        near = [name for name in listed if any(word in name for word in words)][:3]
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"it has {', '.join(listed[:5])}{' ...' if len(listed) > 5 else ''}."
