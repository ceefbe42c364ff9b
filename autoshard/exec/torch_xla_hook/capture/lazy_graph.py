"""The pending lazy graph as a module with named, classified arguments."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.values.lazy_tensors import handles, xlac
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh, UserMarks, held_spec, is_split
from autoshard.program import Argument, Program, Result, Role


@dataclasses.dataclass(frozen=True)
class Known:
    """A tensor that the watcher saw before it was changed: what it is called and what it is for."""

    name: str
    role: Role
    tensor: Any
    whole: tuple[int, ...] | None = None
    """The shape of what the device data only stands for."""


@dataclasses.dataclass(frozen=True)
class Capture:
    """One pending graph: the program, and the tensors that go with its arguments and results."""

    program: Program
    inputs: tuple[Any, ...]
    """Tensors that hold the data of each argument."""
    handles: tuple[int, ...]
    """The device's handles of this data."""
    tensors: tuple[Any, ...]
    """The user's tensor that each argument was the value of, before the step; None if nobody knows it."""
    roots: tuple[Any, ...]
    """The live tensor that each result is the value of."""
    places: tuple[tuple[int, int] | None, ...]
    """Where each recorded value is made: op number and result of the module; None if the roots do not need it."""
    flow: mlir.Flow
    split: Mapping[int, str]
    """HLO sharding strings of arguments that are split already, by argument number."""
    users: frozenset[int]
    """Which of these arguments the script has split itself."""


def capture(
    roots: Sequence[Any],
    recorded: Sequence[Any],
    known: Mapping[int, Known],
    training: bool,
    name: str,
    mesh: LiveMesh,
    marks: UserMarks,
    own_pins: frozenset[tuple[str, tuple[int, ...]]] = frozenset(),
) -> Capture:
    """Read the graph that computes `roots` and `recorded`; nothing is executed.

    `known` maps data handles to what is known of the tensors that held them. `recorded` become places, not results.
    Constraints in the graph that the mesh can express stay in it, but for our own: `own_pins` (sharding strings, and
    shapes of what they are on) of an earlier plan, and those by which PyTorch/XLA keeps how state is split that is
    updated in place.

    Raises `UserError` where an op gives a tuple.
    """

    every = [*roots, *recorded]
    data = xlac()._get_tensors_xla_device_data_node(every)[1]
    source: bytes = xlac()._get_stablehlo(every, "", [], True)
    module = mlir.inline_calls(mlir.parse_module(source))
    if tupled := mlir.tuple_calls(module):
        raise UserError(f"the step calls {', '.join(tupled)}, whose results are a tuple: such a step cannot be planned")
    of_data = handles(data)
    found = [known.get(handle) for handle in of_data]
    whole = {number: each.whole for number, each in enumerate(found) if each is not None and each.whole is not None}
    mlir.give_whole(module, whole)
    held = {number: held_spec(value) for number, value in enumerate(data) if value.dim() > 0}
    theirs = marks.data() if any(held.values()) else set()
    marked = {
        number
        for number, each in enumerate(found)
        if of_data[number] in theirs or (each is not None and marks.holds(each.tensor))
    }
    ours = {(text, tuple(data[number].shape)) for number, text in held.items() if number not in marked} | own_pins
    own = 0

    def read(text: str, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...] | None:
        nonlocal own
        if (text, shape) in ours:
            own += 1
            return None
        return mesh.read_dims(text, len(shape))

    dropped = mlir.constrain_custom_calls(module, "mesh", mesh.sizes, read) - own
    places = mlir.cut_results(module, len(roots))
    types, result_types = mlir.main_types(module)
    shapes = [whole.get(number, tuple(value.shape)) for number, value in enumerate(data)]
    if shapes != [shape for shape, _ in types]:
        raise RuntimeError(
            f"the graph's inputs {shapes} are not the module's arguments {[shape for shape, _ in types]}: "
            "this version of torch_xla orders them in another way"
        )
    names, roles = _classify(found, types)
    by_tensor = {id(each.tensor): number for number, each in enumerate(found) if each is not None}
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
        fingerprint=_fingerprint(module, arguments),
        training=training,
        notes=(f"{dropped} constraints that the mesh cannot express were dropped.",) if dropped else (),
    )
    split = {number: text for number, text in held.items() if is_split(text)}
    tensors = [None if each is None else each.tensor for each in found]
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
    raise RuntimeError("a captured graph runs in PyTorch/XLA only")


def _classify(found: Sequence[Known | None], types: Sequence[tuple[tuple[int, ...], str]]) -> tuple[list[str], list]:
    """A name and a role for each argument. Data that nobody knows is data: labels, masks, and scalars of ops."""
    names: list[str] = []
    roles: list[Role] = []
    taken: set[str] = set()
    for number, (each, (shape, _)) in enumerate(zip(found, types, strict=True)):
        name = each.name if each is not None else f"input.{number}" if shape else f"scalar.{number}"
        while name in taken:
            name += "_"
        taken.add(name)
        names.append(name)
        roles.append(each.role if each is not None else Role.BATCH if shape else Role.OTHER)
    return names, roles


def _result_name(labels: Mapping[int, str], root: Any, number: int) -> str:
    if id(root) in labels:
        return f"result.{labels[id(root)]}"
    return f"result.{number}"


def _fingerprint(module: Any, arguments: Sequence[Argument]) -> str:
    digest = hashlib.sha256(mlir.canonical_text(module).encode())
    digest.update(json.dumps([[a.name, a.role.value] for a in arguments]).encode())
    return digest.hexdigest()


def own_sharding(taken: Capture, number: int | None, mesh: LiveMesh) -> Any:
    """The user's own sharding of an argument that the mesh cannot express: what replaces it is split so too.

    None where there is none.
    """
    if number is None or number not in taken.users:
        return None
    value, text = taken.inputs[number], taken.split[number]
    return None if mesh.read(text, value.dim()) is not None else xlac()._get_xla_op_sharding(value)
