"""Reshard of state from one plan to another: bytes that devices and hosts store, receive and read, before any is
moved.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from autoshard.base.units import dtype_bits
from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec


@dataclasses.dataclass(frozen=True, slots=True)
class StateReshard:
    """Bytes and seconds for resharding the parameters, optimizer state and buffers of one plan to another plan.

    Devices are ordered by their number in the topology, hosts by their first device. All bytes follow from the specs.
    Seconds are lower bounds from the rates of links and disks.
    """

    names: tuple[str, ...]
    """State that both plans have, in one shape and dtype."""
    left_out: tuple[str, ...]
    """State that only one plan has, or that differs in shape or dtype, sorted."""
    whole_bytes: int
    """Bytes of the state once: the size of a checkpoint in which one device writes each shard."""
    largest_bytes: int
    """Bytes of the largest tensor, unsplit."""
    before_bytes: tuple[int, ...]
    """Bytes of the state by device under the first plan; 0 for a device outside of the plan."""
    after_bytes: tuple[int, ...]
    """Bytes of the state by device under the second plan."""
    received_bytes: tuple[int, ...]
    """Bytes by device that the second plan stores there and the first does not: the traffic if devices send to each
    other.
    """
    peak_bytes: tuple[int, ...]
    """Peak bytes by device if tensors are moved one after the other and each old one is freed afterwards."""
    read_bytes: tuple[int, ...]
    """Bytes by host that its devices read from a checkpoint; a shard that several of them store is read once."""
    largest_read_bytes: int
    """Most bytes of one tensor that a host reads."""
    link_s: float
    """Least seconds for the device that receives most, over all of its links in the second plan's topology."""
    disk_s: float | None
    """Least seconds for the host that reads most; None without a disk rate."""


def predict_reshard(
    first: Plan, second: Plan, *, hosts: int | None = None, disk_bytes_per_s: float | None = None
) -> StateReshard:
    """Return the bytes and seconds of resharding one plan's state to another plan: live, or through a checkpoint of
    `first`.

    - `hosts`: processes of the second plan, each with equally many devices in a row. Default: the hosts of its
      topology.
    - `disk_bytes_per_s`: read rate of one host; None leaves `disk_s` None.

    Batches are not moved. Raises `UserError` for plans without common state, and for a number of hosts that does not
    divide the devices.
    """
    state = {name for plan in (first, second) for name, role in plan.roles.items() if role != "batch"}
    kinds = [{name: (plan.shapes[name], plan.dtypes[name]) for name in plan.arguments} for plan in (first, second)]
    known = [name for name in first.arguments if name in state]
    names = [name for name in known if kinds[0][name] == kinds[1].get(name)]
    if not names:
        raise UserError("the two plans have no state in common: plan the same model for both.")
    topology = Topology.parse(second.topology)
    host_of = _hosts(topology, hosts)
    count = max(len(first.device_order), topology.num_devices)
    before, after, received, peak = (np.zeros(count, np.int64) for _ in range(4))
    read = np.zeros(int(host_of.max()) + 1, np.int64)
    whole_bytes = largest = largest_read = 0
    for name in names:
        shape, dtype = kinds[0][name]
        bits = dtype_bits(dtype)
        old, new = (shard_bounds(plan, plan.arguments[name], shape, count) for plan in (first, second))
        common = np.stack([np.maximum(old[0], new[0]), np.minimum(old[1], new[1])])
        old_bytes, new_bytes, common_bytes = (shard_bytes(bounds, bits) for bounds in (old, new, common))
        if not shape:
            old_bytes, new_bytes = (_present(plan, count) * math.ceil(bits / 8) for plan in (first, second))
            common_bytes = np.minimum(old_bytes, new_bytes)
        size = math.ceil(math.prod(shape) * bits / 8)
        after, received = after + new_bytes, received + new_bytes - common_bytes
        peak = np.maximum(peak, after - before)  # in addition to all of the old state
        before = before + old_bytes
        host_bytes = _read_by_host(new, new_bytes, host_of)
        read, largest_read = read + host_bytes, max(largest_read, int(host_bytes.max()))
        whole_bytes, largest = whole_bytes + size, max(largest, size)
    most_received = int(received.max())
    return StateReshard(
        names=tuple(names),
        left_out=tuple(sorted(state - set(names))),
        whole_bytes=whole_bytes,
        largest_bytes=largest,
        before_bytes=tuple(map(int, before)),
        after_bytes=tuple(map(int, after)),
        received_bytes=tuple(map(int, received)),
        peak_bytes=tuple(map(int, before + peak)),
        read_bytes=tuple(map(int, read)),
        largest_read_bytes=largest_read,
        link_s=most_received / _device_rate(topology),
        disk_s=None if disk_bytes_per_s is None else int(read.max()) / disk_bytes_per_s,
    )


def _present(plan: Plan, count: int) -> np.ndarray:
    """Return 1 for every device of the plan, else 0, for `count` devices."""
    present = np.zeros(count, np.int64)
    present[list(plan.device_order)] = 1
    return present


class Placed(Protocol):
    """Devices in the order of a mesh's places, such as those of a plan."""

    @property
    def mesh(self) -> Mapping[str, int]:
        """Sizes of the mesh axes, major first."""
        ...

    @property
    def device_order(self) -> Sequence[int]:
        """Number of the device in each place of the mesh, row-major."""
        ...


def shard_bounds(place: Placed, spec: Spec, shape: tuple[int, ...], count: int) -> np.ndarray:
    """Return the first element and the one after the last, by dim and device [2, dims, devices].

    Both are 0 for devices that are not in `place`. A shard beyond the end of an uneven dim is empty.
    """
    bounds = np.zeros((2, len(shape), count), np.int64)
    rows = np.unravel_index(np.arange(len(place.device_order)), tuple(place.mesh.values()))
    row = dict(zip(place.mesh, rows, strict=True))
    devices = np.array(place.device_order)
    for dim, (size, axes) in enumerate(zip(shape, spec.of_rank(len(shape)).dims, strict=True)):
        part, parts = np.zeros(len(devices), np.int64), 1
        for axis in axes:
            part, parts = part * place.mesh[axis] + row[axis], parts * place.mesh[axis]
        width = -(-size // parts)
        bounds[0, dim, devices] = np.minimum(part * width, size)
        bounds[1, dim, devices] = np.minimum((part + 1) * width, size)
    return bounds


def shard_bytes(bounds: np.ndarray, bits: int) -> np.ndarray:
    """Return the bytes of the elements between bounds as of `shard_bounds`, by device, each rounded up to whole bytes.

    Bounds that end before they begin, as of shards without a common part, give 0. A scalar has no dims, so that it
    counts for every device, also outside of the plan.
    """
    elements = np.maximum(bounds[1] - bounds[0], 0).prod(axis=0)
    return -(-elements * bits // 8)


def _read_by_host(bounds: np.ndarray, sizes: np.ndarray, host_of: np.ndarray) -> np.ndarray:
    """Return for each host the bytes of the shards that its devices store; equal shards count once, empty ones not.

    - `bounds`: shards, as in `shard_bounds`.
    - `sizes`: bytes of each device's shard.
    - `host_of`: host of each device.
    """
    storing = np.flatnonzero(sizes[: len(host_of)])
    shards = np.concatenate([host_of[None, storing], bounds.reshape(-1, bounds.shape[-1])[:, storing]])
    _, first = np.unique(shards, axis=1, return_index=True)
    once = storing[first]
    return np.bincount(host_of[once], weights=sizes[once], minlength=int(host_of.max()) + 1).astype(np.int64)


def _hosts(topology: Topology, count: int | None) -> np.ndarray:
    """Return the number of the host of every device, in order of their first device.

    With `count`, hosts have equally many devices in a row; raises `UserError` if `count` does not divide them.
    Without, hosts are the topology's. If the chip's host shape is unknown, all devices are on one host.
    """
    devices = topology.num_devices
    if count is not None:
        if count < 1 or devices % count:
            raise UserError(f"{count} hosts cannot share {devices} devices evenly: give a divisor of {devices}.")
        return np.arange(devices) * count // devices
    block = topology.chip.host_shape
    if not block or topology.num_hosts == 1:
        return np.zeros(devices, np.int64)
    numbers: dict[tuple[int, ...], int] = {}
    host_of = []
    for device in range(devices):
        part, place, _ = topology.coords(device)
        host = (part, *(at // size for at, size in zip(place, (*block, 1, 1), strict=False)))
        host_of.append(numbers.setdefault(host, len(numbers)))
    return np.array(host_of)


def _device_rate(topology: Topology) -> float:
    """Return the bytes per second that can reach one device over all of its links at once.

    Devices of one machine without links (CPUs) receive at the rate of its memory.
    """
    chip = topology.chip
    if topology.traits.shares_machine:
        return topology.memory_bytes_per_s
    links = 1
    if topology.traits.torus:
        sides = zip(topology.shape, topology.wrap, strict=True)
        links = max(1, sum((2 if size > 2 or wrap else 1) for size, wrap in sides if size > 1))
    network = chip.network_bytes_per_s_per_chip if topology.slices > 1 else 0.0
    return (links * chip.link_oneway_bytes_per_s + network) / topology.devices_per_chip
