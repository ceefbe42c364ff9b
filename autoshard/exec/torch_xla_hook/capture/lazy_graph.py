"""The pending lazy graph as a module with named, classified arguments."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.values.lazy_tensors import handles, xlac
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh, UserMarks, is_split, sharding_text
from autoshard.program import Argument, Program, Result, Role, step_fingerprint


@dataclasses.dataclass(frozen=True)
class Known:
    """Name and role of a tensor that the watcher saw before the step changed it."""

    name: str
    """Name, such as `layers.0.weight`."""
    role: Role
    """Role of the argument that has its data."""
    tensor: Any
    """The user's tensor."""
    whole: tuple[int, ...] | None = None
    """Full shape of the tensor that the device data is a stand-in for; None for the data's own shape."""


@dataclasses.dataclass(frozen=True)
class Capture:
    """One pending graph: the program, and the tensors of its arguments and results."""

    program: Program
    """Program with the graph's module; it has no Python function."""
    inputs: tuple[Any, ...]
    """Tensors with the data of each argument."""
    handles: tuple[int, ...]
    """The device's handles of this data."""
    tensors: tuple[Any, ...]
    """The user's tensor that had each argument's value before the step; None if it is unknown."""
    roots: tuple[Any, ...]
    """The live tensor that has each result as its value."""
    places: tuple[tuple[int, int] | None, ...]
    """Op number and result number that compute each recorded value; None if the roots do not need it."""
    flow: mlir.Flow
    """Flow of values between the module's ops."""
    split: Mapping[int, str]
    """HLO sharding strings of arguments that are split already, by argument number."""
    users: frozenset[int]
    """Numbers of the split arguments that the script itself has marked."""


def capture(
    roots: Sequence[Any],
    recorded: Sequence[Any],
    known: Mapping[int, Known],
    training: bool,
    name: str,
    mesh: LiveMesh,
    marks: UserMarks,
    own_pins: frozenset[tuple[str, int]] = frozenset(),
) -> Capture:
    """Read the graph that computes `roots` and `recorded`; execute nothing.

    - `roots`: live pending tensors, which become the results.
    - `recorded`: pending copies of values inside the step, which become places.
    - `known`: the named tensors, by handle of their data.
    - `training`, `name`: flag and name of the program.
    - `mesh`: the mesh on which constraints and splits are parsed.
    - `marks`: the script's own marks.
    - `own_pins`: sharding strings and ranks of an earlier plan's pins.

    Constraints in the graph that the mesh can express stay in it, except our own. Our own are `own_pins`, and those by
    which PyTorch/XLA retains the split of state that is updated in place. The program's notes count the dropped ones. A
    known tensor among the roots is state: its argument is tied to the result and donated.

    Raises `UserError` if an op returns a tuple that is used whole, or a value whose shape depends on data. Raises
    `RuntimeError` if this torch_xla orders the graph's inputs in another way.
    """

    every = [*roots, *recorded]
    data = xlac()._get_tensors_xla_device_data_node(every)[1]
    source: bytes = xlac()._get_stablehlo(every, "", [], True)
    module = mlir.inline_calls(mlir.parse_module(source))
    if tupled := mlir.untuple_calls(module):
        raise UserError(f"the step calls {', '.join(tupled)}, whose results are a tuple: such a step cannot be planned")
    if mlir.has_dynamic_shapes(module):
        raise UserError("the step computes values whose shape depends on data: such a step cannot be planned")
    of_data = handles(data)
    named = [known.get(handle) for handle in of_data]
    full_shapes = {
        number: each.whole for number, each in enumerate(named) if each is not None and each.whole is not None
    }
    mlir.give_whole(module, full_shapes)
    shardings = {number: sharding_text(value) for number, value in enumerate(data) if value.dim() > 0}
    theirs = marks.data() if any(shardings.values()) else set()
    marked = {
        number
        for number, each in enumerate(named)
        if of_data[number] in theirs or (each is not None and marks.holds(each.tensor))
    }
    ours = {(text, tuple(data[number].shape)) for number, text in shardings.items() if number not in marked}
    own = 0

    def read(text: str, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...] | None:
        """Return the axes of a constraint; None for our own, and for one that the mesh cannot express."""
        nonlocal own
        if (text, shape) in ours or (text, len(shape)) in own_pins:
            own += 1
            return None
        return mesh.read_dims(text, len(shape))

    dropped = mlir.constrain_custom_calls(module, "mesh", mesh.sizes, read) - own
    places = mlir.cut_results(module, len(roots))
    mlir.make_public(module)
    types, result_types = mlir.main_types(module)
    shapes = [full_shapes.get(number, tuple(value.shape)) for number, value in enumerate(data)]
    if shapes != [shape for shape, _ in types]:
        raise RuntimeError(
            f"the graph's inputs {shapes} are not the module's arguments {[shape for shape, _ in types]}: "
            "this version of torch_xla orders them in another way"
        )
    names, roles = _classify(named, types)
    by_tensor = {id(each.tensor): number for number, each in enumerate(named) if each is not None}
    ties = {}
    for number, root in enumerate(roots):
        argument = by_tensor.get(id(root))
        if argument is not None and argument not in ties and types[argument] == result_types[number]:
            ties[argument] = number
    back = {result: argument for argument, result in ties.items()}
    arguments = tuple(
        Argument(names[i], shape, dtype, roles[i], ties.get(i), i in ties) for i, (shape, dtype) in enumerate(types)
    )
    labels = {id(each.tensor): each.name for each in known.values()}
    results = tuple(
        Result(names[back[i]] if i in back else _result_name(labels, root, i), shape, dtype, back.get(i))
        for i, (root, (shape, dtype)) in enumerate(zip(roots, result_types, strict=True))
    )
    program = Program(
        name=name,
        fn=_not_callable,
        args=(),
        donate_argnums=(),
        arguments=arguments,
        results=results,
        module=mlir.to_bytes(module),
        fingerprint=step_fingerprint(module, arguments),
        training=training,
        notes=(f"{dropped} constraints that the mesh cannot express were dropped.",) if dropped else (),
    )
    split = {number: text for number, text in shardings.items() if is_split(text)}
    tensors = [None if each is None else each.tensor for each in named]
    return Capture(
        program=program,
        inputs=tuple(data),
        handles=tuple(of_data),
        tensors=tuple(tensors),
        roots=tuple(roots),
        places=tuple(places),
        flow=mlir.flow(module),
        split=split,
        users=frozenset(marked & split.keys()),
    )


def _not_callable(*_: Any) -> Any:
    """Raise `RuntimeError`: a captured graph has no Python function."""
    raise RuntimeError("a captured graph runs in PyTorch/XLA only")


def _classify(found: Sequence[Known | None], types: Sequence[tuple[tuple[int, ...], str]]) -> tuple[list[str], list]:
    """Return a unique name and a role for each argument. Unknown data is batch data (labels, masks) or a scalar of an
    op.

    - `found`: known tensor of each argument's data; None for nothing.
    - `types`: shape and dtype of each argument.
    """
    names: list[str] = []
    roles: list[Role] = []
    used: set[str] = set()
    for number, (each, (shape, _)) in enumerate(zip(found, types, strict=True)):
        name = each.name if each is not None else f"input.{number}" if shape else f"scalar.{number}"
        while name in used:
            name += "_"
        used.add(name)
        names.append(name)
        roles.append(each.role if each is not None else Role.BATCH if shape else Role.OTHER)
    return names, roles


def _result_name(labels: Mapping[int, str], root: Any, number: int) -> str:
    """Return the name of a result that updates no argument, by its tensor's name in `labels`, else by its number."""
    if id(root) in labels:
        return f"result.{labels[id(root)]}"
    return f"result.{number}"


def own_sharding(capture: Capture, number: int | None, mesh: LiveMesh) -> Any:
    """Return the user's own sharding of an argument that the mesh cannot express; the argument's update is split so
    too.

    `number` is the argument's; None gives None. None too if the user has not marked the argument, or if the mesh can
    express the mark.
    """
    if number is None or number not in capture.users:
        return None
    value, text = capture.inputs[number], capture.split[number]
    return None if mesh.read(text, value.dim()) is not None else xlac()._get_xla_op_sharding(value)
