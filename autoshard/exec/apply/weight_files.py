"""Weights in safetensors files: reads into, and writes from, parameters that are sharded as planned."""

import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard.base.files import read_json
from autoshard.errors import UserError
from autoshard.exec.devices.local_devices import named_sharding
from autoshard.planning import Plan
from autoshard.program import Program, host_array


INDEX = "model.safetensors.index.json"
"""Name of the file that maps tensors to files."""
FILE_BYTES = 2 << 30
"""Bytes after which a file is closed. A process has at most that many bytes and one more tensor in memory."""


class Files:
    """Tensors of one model, in one file or in all files of a folder; their data is read on request."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file, or the files of the folder, at `path`; a folder's files are those of its index, else
        `*.safetensors`.

        If several files have a tensor, the file that sorts last counts. Raises `UserError` if there are no files, or if
        one is no safetensors file.
        """
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        if self.path.is_file():
            files = [self.path]
        elif self.path.is_dir():
            index = self.path / INDEX
            matches = self.path.glob("*.safetensors")
            files = sorted((self.path / name for name in _named_files(index)) if index.is_file() else matches)
        else:
            raise UserError(f"there is no folder or file `{path}` to read weights from.")
        if not files:
            raise UserError(f"`{path}` holds no weights: there is no file *.safetensors in it.")
        self._of: dict[str, Any] = {}
        for file in files:
            try:
                opened = safe_open(str(file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"`{file}` cannot be read as safetensors: {error}.") from error
            self._of |= dict.fromkeys(opened.keys(), opened)

    def named(self, name: str) -> str:
        """Return the files' name of a model's parameter, which may lack the base model's name or add it.

        An equal name has priority, then `name` without its first part, then the only tensor that has one part more.
        Raises `UserError` if the files have no such tensor, or several of the last form.
        """
        if name in self._of:
            return name
        _, _, rest = name.partition(".")
        longer = [key for key in self._of if key.partition(".")[2] == name]
        if rest in self._of or len(longer) == 1:
            return rest if rest in self._of else longer[0]
        raise UserError(
            f"`{self.path}` has no `{name}` among its {len(self._of)} tensors; give the weights of this model, with "
            "its tensors as transformers' own code of it has them."
        )

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor `key`, a name in the files, without reading its data."""
        return tuple(self._of[key].get_slice(key).get_shape())

    def part(self, key: str, index: tuple[slice, ...]) -> Any:
        """Read a part of the tensor `key` as a numpy array; no other part is read. An empty `index` reads a scalar.

        Beyond the end of the tensor, a part has zeros.
        """
        import numpy as np

        opened = self._of[key]
        if not index:
            return host_array(opened.get_tensor(key))
        bounds = [
            (min(each.start, size), min(each.stop, size)) for each, size in zip(index, self.shape(key), strict=True)
        ]
        there = host_array(opened.get_slice(key)[tuple(slice(*each) for each in bounds)])
        return np.pad(
            there, [(0, each.stop - each.start - size) for each, size in zip(index, there.shape, strict=True)]
        )


def _named_files(index: Path) -> set[str]:
    """Return the names of files in an index's `weight_map`, without duplicates. Raises `UserError` if it is no
    index.
    """
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"`{index}` is no index of weights: it has no `weight_map` from tensors to files.")
    return set(places.values())


def load_weights(plan: Plan, path: str | os.PathLike[str], program: Program, mesh: Any) -> dict[str, Any]:
    """Load a model's weights as global arrays by parameter name, sharded over `mesh` as planned; see
    `Plan.load_weights`.

    Values are cast to the planned dtypes, and weights in `plan.host` stay on the host. All shapes are checked before
    anything is loaded; further tensors in the files are ignored. Raises `UserError` if the files do not fit the plan.
    """
    import jax

    wanted = _stacks(plan, program)
    files = Files(path)
    for name, members in wanted.items():  # check all shapes before loading anything
        shape = plan.shapes[name] if len(members) == 1 else plan.shapes[name][1:]  # a stack has at least two layers
        for member in members:
            stored, needed = files.shape(files.named(member)), program.unpadded.get(member, shape)
            if stored != needed:
                raise UserError(
                    f"`{member}` is of shape {list(stored)} in `{path}` and of {list(needed)} in {plan.program_name}; "
                    "give the weights of this model."
                )
    loaded = {}
    for name, members in wanted.items():
        keys = [files.named(member) for member in members]
        part = functools.partial(_part, files, keys, plan.shapes[name], jax.numpy.dtype(plan.dtypes[name]), {})
        sharding = named_sharding(mesh, plan.arguments[name], name in plan.host)
        loaded[name] = jax.make_array_from_callback(plan.shapes[name], sharding, part)
    return loaded


def _part(files: Files, keys: Sequence[str], shape: Sequence[int], dtype: Any, read: dict[Any, Any], index: Any) -> Any:
    """Read a part of a parameter, which is one tensor or a stack of several, as a numpy array of `dtype`.

    - `keys`: names of the tensors in the files; with several, the parameter's first dim counts them.
    - `shape`: whole shape of the parameter.
    - `dtype`: dtype of the result.
    - `read`: cache of parts that were read already, for devices with equal shards; the new part is added.
    - `index`: slices of the part, one for each dim.
    """
    import numpy as np

    places = tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
    if places not in read:
        ranges = tuple(slice(*place) for place in places)
        if len(keys) == 1:
            read[places] = files.part(keys[0], ranges).astype(dtype)
        else:
            read[places] = np.stack([files.part(key, ranges[1:]).astype(dtype) for key in keys[ranges[0]]])
    return read[places]


def save_weights(plan: Plan, params: Mapping[str, Any], folder: str | os.PathLike[str], program: Program) -> list[Path]:
    """Write sharded parameters as safetensors files and return their paths; see `Plan.save_weights`.

    One file is named `model.safetensors`; several are numbered and have an index. They are written to a sibling folder
    first, so that `folder` appears only when complete. Frozen parameters may be left out of `params`.

    Raises `UserError` for parameters of another model, for parameters of several processes, and for a `folder` that is
    a file or not empty.
    """
    from safetensors.torch import save_file

    stacks = _stacks(plan, program)
    # Frozen parameters have not changed since they were read, and may be left out.
    wanted = {name: members for name, members in stacks.items() if name in params or plan.roles[name] == "parameter"}
    if set(params) != set(wanted):
        odd = sorted(set(params) ^ set(wanted))
        label = "no" if odd[0] in wanted else "unknown"
        raise UserError(f"the parameters are not those of {plan.program_name}: {label} `{odd[0]}`.")
    if any(not array.is_fully_addressable for array in params.values()):
        raise UserError("weights are written by one process; these parameters are on devices of several.")
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"`{folder}` exists and is no empty folder; name another to write weights to.")
    scratch = target.with_name(f".{target.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        files: list[list[str]] = []
        for group in _filled(params, wanted, program.unpadded):
            save_file(group, str(scratch / f"{len(files)}.safetensors"), metadata={"format": "pt"})
            files.append(list(group))
        names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
        names = ["model.safetensors"] if len(files) == 1 else names
        for number, name in enumerate(names):
            os.replace(scratch / f"{number}.safetensors", scratch / name)
        if len(files) > 1:
            total = sum(array.size * array.dtype.itemsize for array in params.values())
            places = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (scratch / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if target.exists():
            target.rmdir()
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [target / name for name in names]


def _filled(
    params: Mapping[str, Any], stacks: Mapping[str, tuple[str, ...]], unpadded: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, Any]]:
    """Yield groups of whole torch tensors by name, one for each file; each tensor is gathered just before its use.

    A group ends with the tensor that fills it to `FILE_BYTES`; the last may be smaller. A stacked parameter yields one
    tensor for each of its names in `stacks`. Tensors in `unpadded` are cut to these shapes.
    """
    import numpy as np
    import torch

    group: dict[str, Any] = {}
    size = 0
    for name, members in stacks.items():
        for number, member in enumerate(members):
            array = params[name] if len(members) == 1 else params[name][number]
            value = np.array(array)
            if member in unpadded:
                value = np.ascontiguousarray(value[tuple(slice(0, size) for size in unpadded[member])])
            narrow = value.dtype.name == "bfloat16"
            tensor = torch.from_numpy(value.view(np.int16) if narrow else value)
            group[member] = tensor.view(torch.bfloat16) if narrow else tensor
            size += value.nbytes
            if size >= FILE_BYTES:
                yield group
                group, size = {}, 0
    if group:
        yield group


def _stacks(plan: Plan, program: Program) -> Mapping[str, tuple[str, ...]]:
    """Map each parameter to the names of the model's tensors that it stacks, in order; one name for an unstacked one.

    Raises `UserError` if the program has no named weights, or is not the plan's.
    """
    if not program.weights:
        raise UserError(
            f"{program.name} has no weights that files name: only models of hf:CONFIG and torch modules have."
        )
    if program.fingerprint != plan.program_fingerprint:
        raise UserError(f"the plan is of {plan.program_name}, another program than {program.name}.")
    return program.weights
