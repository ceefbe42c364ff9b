"""The arguments of a plan as a tree of modules, with repeated blocks folded into one."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from autoshard.planning import Plan
from autoshard.report.display import clean
from autoshard.report.figures import tensor_bytes


@dataclasses.dataclass(slots=True)
class TreeNode:
    """A module or a tensor. Sizes are bytes over all `repeats`; `device_bytes` are those of one device."""

    label: str
    """Last part of the name; `0–31` for merged blocks."""
    repeats: int = 1
    """Number of merged blocks, or of the layers of a stack."""
    total_bytes: int = 0
    """Bytes of the whole tensors, over all `repeats`."""
    device_bytes: int = 0
    """Bytes of one device's parts of the tensors, over all `repeats`."""
    comm_s: float = 0.0
    """Seconds of communication in one step that the tensors cause."""
    children: list["TreeNode"] = dataclasses.field(default_factory=list)
    """Modules and tensors of a module, in the plan's order; empty for a tensor."""
    name: str = ""
    """Full name of a tensor; empty for a module."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    dims: tuple[tuple[str, ...], ...] = ()
    """Mesh axes that split each dim of a tensor."""

    def signature(self) -> Any:
        """Return a value that is equal for blocks with the same tensors and specs; the block's own label does not
        count.
        """
        return (self.shape, self.dtype, self.dims, tuple((child.label, child.signature()) for child in self.children))

    def to_json(self) -> dict[str, Any]:
        """Return the tree as a JSON object; a tensor has name, shape, dtype and dims, a module its children."""
        value: dict[str, Any] = {
            "label": self.label,
            "repeats": self.repeats,
            "total": self.total_bytes,
            "device": self.device_bytes,
            "comm": self.comm_s,
        }
        if self.name:
            value |= {"name": self.name, "shape": self.shape, "dtype": self.dtype, "dims": self.dims}
        else:
            value["children"] = [child.to_json() for child in self.children]
        return value


ROLE_TITLES = {
    "parameter": "parameters",
    "frozen": "frozen parameters",
    "optimizer_state": "optimizer state",
    "batch": "batch",
    "other": "other arguments",
}
"""Labels of the trees by role, in the order of the report."""


def module_trees(plan: Plan) -> list[TreeNode]:
    """Return one tree for each role that the plan's arguments have, in the order of `ROLE_TITLES`."""
    trees = []
    for role, title in ROLE_TITLES.items():
        names = [name for name in plan.arguments if plan.roles[name] == role]
        if names:
            root = TreeNode(title)
            for name in names:
                _insert(root, name, plan)
            _settle(root, _seconds_by_cause(plan))
            trees.append(root)
    return trees


def _insert(root: TreeNode, name: str, plan: Plan) -> None:
    """Insert an argument below the modules in its name, and add modules that are missing."""
    node = root
    *modules, last = name.split(".")
    for part in modules:
        child = next((c for c in reversed(node.children) if c.label == part and not c.name), None)
        if child is None:
            child = TreeNode(clean(part, 200))
            node.children.append(child)
        node = child
    spec, shape, dtype = plan.arguments[name], plan.shapes[name], plan.dtypes[name]
    leaf = TreeNode(clean(last, 200), name=name, shape=shape, dtype=dtype, dims=spec.dims)
    leaf.total_bytes = tensor_bytes(shape, dtype)
    leaf.device_bytes = tensor_bytes(spec.local_shape(shape, plan.mesh), dtype)
    node.children.append(leaf)


def _seconds_by_cause(plan: Plan) -> dict[str, float]:
    """Return the seconds of communication in one step by the name of the tensor or op that causes them."""
    seconds: dict[str, float] = {}
    for collective in plan.prediction.collectives:
        seconds[collective.cause] = seconds.get(collective.cause, 0.0) + collective.seconds
    return seconds


def _settle(node: TreeNode, seconds: Mapping[str, float]) -> None:
    """Sum sizes and times from the leaves up, merge repeats and modules of a single tensor, in place.

    - `seconds`: seconds of communication by name.
    """
    if node.name:
        node.comm_s = seconds.get(node.name, 0.0)
        return
    for child in node.children:
        _settle(child, seconds)
    node.children = [_only_tensor(child) for child in _folded(node.children)]
    if node.label == "*":
        node.repeats = _stacked(node)
    node.total_bytes = sum(child.total_bytes for child in node.children)
    node.device_bytes = sum(child.device_bytes for child in node.children)
    node.comm_s = sum(child.comm_s for child in node.children)


def _only_tensor(node: TreeNode) -> TreeNode:
    """Return a module with a single tensor as that tensor, with a joint label such as `q_proj.weight`; else `node`."""
    if len(node.children) != 1 or not node.children[0].name or node.repeats > 1:
        return node
    (leaf,) = node.children
    leaf.label = f"{node.label}.{leaf.label}"
    return leaf


def _stacked(node: TreeNode) -> int:
    """Return the number of layers of a stacked block: the leading dim that all its tensors share, or 1 if they share
    none.
    """
    leading = {child.shape[:1] if child.name else (_stacked(child),) for child in node.children}
    (first,) = leading if len(leading) == 1 else ((),)
    return first[0] if first else 1


def _folded(children: Iterable[TreeNode]) -> Iterable[TreeNode]:
    """Yield the children, with neighbours under numbers merged if their signatures are equal."""
    run: list[TreeNode] = []
    for child in children:
        if run and child.label.isdigit() and run[0].label.isdigit() and child.signature() == run[0].signature():
            run.append(child)
            continue
        yield from _merged(run)
        run = [child]
    yield from _merged(run)


def _merged(run: list[TreeNode]) -> Iterable[TreeNode]:
    """Yield one node for a run of equal blocks, with their summed sizes; nothing for an empty run."""
    if len(run) > 1:
        first = run[0]
        _add_up(first, run[1:])
        first.label = f"{first.label}–{run[-1].label}"
        first.repeats = len(run)
    yield from run[:1]


def _add_up(node: TreeNode, others: list[TreeNode]) -> None:
    """Add the sizes and times of other blocks to a node of the same structure, on every level."""
    node.total_bytes += sum(other.total_bytes for other in others)
    node.device_bytes += sum(other.device_bytes for other in others)
    node.comm_s += sum(other.comm_s for other in others)
    for index, child in enumerate(node.children):
        _add_up(child, [other.children[index] for other in others])
