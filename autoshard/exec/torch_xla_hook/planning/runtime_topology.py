"""The devices that PyTorch/XLA sees: their topology, and their numbers over a plan's mesh."""

import math
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from autoshard.base.units import GIB
from autoshard.cost import AUTO, MESH_VARIABLE, Topology, chip_of_kind, make_mesh, parse_mesh
from autoshard.errors import UserError
from autoshard.exec.devices.local_devices import by_coordinates
from autoshard.exec.torch_xla_hook.values.lazy_tensors import xlac
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh


TOPOLOGY_VARIABLE = "AUTOSHARD_TOPOLOGY"
LIMIT_VARIABLE = "AUTOSHARD_MEMORY_LIMIT"


def topology_here() -> str:
    """Return the name of the topology that PyTorch/XLA's devices of all hosts form, such as `cpu:8` or `v5e:4x4`.

    `AUTOSHARD_TOPOLOGY`, if not empty, is returned unchecked. Raises `UserError` for devices other than CPUs and TPUs,
    and for unknown TPUs.
    """
    import torch_xla.runtime as xr

    given = os.environ.get(TOPOLOGY_VARIABLE)
    if given:
        return given
    kind, count = xr.device_type(), xr.global_runtime_device_count()
    if kind == "CPU":
        return f"cpu:{count}"
    if kind == "TPU":
        return tpu_topology(_device_kind(), xr.global_runtime_device_attributes())
    raise UserError(
        f"PyTorch/XLA runs on {kind}, whose shape cannot be read: set {TOPOLOGY_VARIABLE}, for example to h100:8."
    )


def tpu_topology(kind: str, attributes: list[dict[str, Any]]) -> str:
    """Name the topology of TPUs of a kind (`TPU v5 lite`) from their coordinates and slices, such as `v5e:4x4*2`.

    `attributes` are the runtime's records of all devices, with `coords` and perhaps `slice_index` (default 0). The
    shape is the bounding box of the slice of least index, and all slices count as equal. Raises `UserError` for an
    unknown kind.
    """
    chip = chip_of_kind(kind)
    if chip is None:
        raise UserError(f"chips of the kind {kind!r} are not known: set {TOPOLOGY_VARIABLE}, for example to v5e:4x4.")
    slices = sorted({each.get("slice_index", 0) for each in attributes})
    first = [tuple(each["coords"]) for each in attributes if each.get("slice_index", 0) == slices[0]]
    sizes = [max(c[k] for c in first) - min(c[k] for c in first) + 1 for k in range(3)]
    shape = "x".join(map(str, sizes[: chip.torus_dims]))
    return f"{chip.name}:{shape}" + (f"*{len(slices)}" if len(slices) > 1 else "")


def _device_kind() -> str:
    """Return the runtime's name of the kind of the default device, such as `TPU v5 lite`."""
    return xlac()._xla_device_kind(xlac()._xla_get_default_device())


def mesh_here() -> dict[str, int] | None:
    """Return the sizes by axis that `XLA_AUTO_SPMD_MESH` gives; None for `auto`, in any case of letters.

    If the variable is empty, all devices form `data`, and `model` has size 1. Raises `UserError` if the text is no
    mesh, or if the product of the sizes is not the number of devices.
    """
    import torch_xla.runtime as xr

    count = xr.global_runtime_device_count()
    text = os.environ.get(MESH_VARIABLE, "").strip()
    if text.lower() == AUTO:
        return None
    try:
        sizes = parse_mesh(text) if text else {"data": count, "model": 1}
    except UserError as error:
        raise UserError(f"{MESH_VARIABLE}={text}: {error}") from None
    devices = 1
    for size in sizes.values():
        devices *= size
    if devices != count:
        raise UserError(
            f"{MESH_VARIABLE}={text} names {devices} devices, but PyTorch/XLA sees {count}: "
            f"give sizes whose product is {count}."
        )
    return sizes


def memory_limit_here() -> int | None:
    """Return the bytes of one device that `AUTOSHARD_MEMORY_LIMIT` (GiB, fractions allowed) allows; None if it is
    empty.

    Raises `UserError` if the value is no number, or not between 1 byte and 2**62 bytes.
    """
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return None
    try:
        size = float(text) * GIB
    except ValueError:
        size = math.nan
    if not 1 <= size < 2**62:
        raise UserError(f"{LIMIT_VARIABLE}={text} is no memory of a device: give GiB, for example 15.5.")
    return int(size)


def live_mesh(topology: str, mesh: Mapping[str, int]) -> LiveMesh:
    """Return the mesh of sizes `mesh` for `topology`, over the runtime's devices in the order that a plan would use.

    Raises `UserError` as `xla_devices` does.
    """
    order = make_mesh(Topology.parse(topology), mesh).device_order
    return LiveMesh(mesh, xla_devices(topology, order))


def xla_devices(topology: str, device_order: Sequence[int]) -> tuple[int, ...]:
    """Return PyTorch/XLA's numbers of a plan's devices, row-major over its mesh.

    `device_order` has the plan's numbers: a device's place in its topology. TPUs are found by slice and coordinates.
    Without a torus or without coordinates both numberings are the same. Raises `UserError` if the runtime has another
    number of devices.
    """
    import torch_xla.runtime as xr

    count = xr.global_runtime_device_count()
    if count != len(device_order):
        raise UserError(
            f"the plan is for {topology} with {len(device_order)} devices, but PyTorch/XLA sees {count}: "
            "plan for the devices that are here."
        )
    parsed = Topology.parse(topology)
    attributes: Sequence[Mapping[str, Any]] = xr.global_runtime_device_attributes()
    if not parsed.traits.torus or not all("coords" in each for each in attributes):
        return tuple(device_order)
    return numbers_by_coordinates(parsed, device_order, attributes)


def numbers_by_coordinates(
    topology: Topology, device_order: Sequence[int], attributes: Sequence[Mapping[str, Any]]
) -> tuple[int, ...]:
    """Return the runtime's device numbers in a plan's device order.

    - `topology`: the topology whose places `device_order` numbers.
    - `attributes`: the runtime's record of each device. Its name ends in the number (`TPU:3` is 3); it has `coords`,
      and perhaps `slice_index` and `core_on_chip` (default 0).
    """
    pool = [
        SimpleNamespace(
            slice_index=each.get("slice_index", 0),
            coords=tuple(each["coords"]),
            core_on_chip=each.get("core_on_chip", 0),
            ordinal=int(each["name"].rsplit(":", 1)[-1]),
        )
        for each in attributes
    ]
    numbered = by_coordinates(topology, pool)
    return tuple(numbered[number].ordinal for number in device_order)
