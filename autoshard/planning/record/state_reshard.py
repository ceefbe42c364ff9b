"""State that goes from one plan to another: what devices and hosts hold, receive and read, before it is moved."""

import dataclasses
import math

import numpy as np

from autoshard.base.units import dtype_bits
from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec


@dataclasses.dataclass(frozen=True, slots=True)
class StateReshard:
    """Parameters, states of optimizers and buffers of one plan that are to be held as another plan has them.

    By device is by its number in the topology, by host in the order of the first device of each. All bytes follow from
    the specs; seconds are what the rates of links and disks allow at best.
    """

    names: tuple[str, ...]
    """What both plans have, in one shape."""
    left_out: tuple[str, ...]
    """State that only one of them has, or that has another shape or dtype."""
    whole_bytes: int
    """The state once: what a checkpoint takes, where each shard is written by one of those that hold it."""
    largest_bytes: int
    """The whole of the largest tensor."""
    before_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    """What a device is to hold and does not hold yet: what has to go to it where devices send to each other."""
    peak_bytes: tuple[int, ...]
    """The most of a device where tensors are moved one after the other, and the old one is let go after each."""
    read_bytes: tuple[int, ...]
    """What the devices of a host take out of a checkpoint; what several of them hold alike is read once."""
    largest_read_bytes: int
    """The most of one tensor that a host takes."""
    link_s: float
    """What the device that receives most needs at least."""
    disk_s: float | None
    """What the host that reads most needs at least; None where no rate is given."""


def predict_reshard(
    first: Plan, second: Plan, *, hosts: int | None = None, disk_bytes_per_s: float | None = None
) -> StateReshard:
    """What moving the state of one plan to another takes: live, or through a checkpoint that `first` has saved.

    `hosts` are processes of the second plan, each with as many devices in a row (default: the hosts of its topology);
    `disk_bytes_per_s` is what one of them reads at. Batches are not moved. Raises `UserError` for plans that have no
    state in common, and for a number of hosts that does not divide the devices.
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
    whole = largest = largest_read = 0
    for name in names:
        shape, dtype = kinds[0][name]
        bits = dtype_bits(dtype)
        old, new = (_bounds(plan, plan.arguments[name], shape, count) for plan in (first, second))
        common = np.stack([np.maximum(old[0], new[0]), np.minimum(old[1], new[1])])
        olds, news, both = (_bytes(bounds, bits) for bounds in (old, new, common))
        if not shape:
            olds, news = (_present(plan, count) * math.ceil(bits / 8) for plan in (first, second))
            both = np.minimum(olds, news)
        size = math.ceil(math.prod(shape) * bits / 8)
        after, received = after + news, received + news - both
        peak = np.maximum(peak, after - before)  # beside all of the old state
        before = before + olds
        taken = _read_by_host(new, news, host_of)
        read, largest_read = read + taken, max(largest_read, int(taken.max()))
        whole, largest = whole + size, max(largest, size)
    most = int(received.max())
    return StateReshard(
        names=tuple(names),
        left_out=tuple(sorted(state - set(names))),
        whole_bytes=whole,
        largest_bytes=largest,
        before_bytes=tuple(map(int, before)),
        after_bytes=tuple(map(int, after)),
        received_bytes=tuple(map(int, received)),
        peak_bytes=tuple(map(int, before + peak)),
        read_bytes=tuple(map(int, read)),
        largest_read_bytes=largest_read,
        link_s=most / _device_rate(topology),
        disk_s=None if disk_bytes_per_s is None else int(read.max()) / disk_bytes_per_s,
    )


def _present(plan: Plan, count: int) -> np.ndarray:
    """1 for every device that the plan has."""
    found = np.zeros(count, np.int64)
    found[list(plan.device_order)] = 1
    return found


def _bounds(plan: Plan, spec: Spec, shape: tuple[int, ...], count: int) -> np.ndarray:
    """First element and the one after the last by dim and device; none of it for a device that the plan has not."""
    bounds = np.zeros((2, len(shape), count), np.int64)
    places = np.unravel_index(np.arange(len(plan.device_order)), tuple(plan.mesh.values()))
    place = dict(zip(plan.mesh, places, strict=True))
    devices = np.array(plan.device_order)
    for dim, (size, axes) in enumerate(zip(shape, spec.of_rank(len(shape)).dims, strict=True)):
        part, parts = np.zeros(len(devices), np.int64), 1
        for axis in axes:
            part, parts = part * plan.mesh[axis] + place[axis], parts * plan.mesh[axis]
        width = -(-size // parts)
        bounds[0, dim, devices] = np.minimum(part * width, size)
        bounds[1, dim, devices] = np.minimum((part + 1) * width, size)
    return bounds


def _bytes(bounds: np.ndarray, bits: int) -> np.ndarray:
    """By device, of what lies between."""
    elements = np.maximum(bounds[1] - bounds[0], 0).prod(axis=0)
    return -(-elements * bits // 8)


def _read_by_host(bounds: np.ndarray, sizes: np.ndarray, host_of: np.ndarray) -> np.ndarray:
    """By host, bytes of the different shards of its devices."""
    shards = np.concatenate([host_of[None, :], bounds.reshape(-1, bounds.shape[-1])[:, : len(host_of)]])
    _, once = np.unique(shards, axis=1, return_index=True)
    return np.bincount(host_of[once], weights=sizes[once], minlength=int(host_of.max()) + 1).astype(np.int64)


def _hosts(topology: Topology, count: int | None) -> np.ndarray:
    """The host of every device."""
    devices = topology.num_devices
    if count is not None:
        if count < 1 or devices % count:
            raise UserError(f"{count} hosts cannot share {devices} devices evenly: give a divisor of {devices}.")
        return np.arange(devices) * count // devices
    block = topology.chip.host_shape
    if not block or topology.num_hosts == 1:
        return np.zeros(devices, np.int64)
    numbers: dict[tuple[int, ...], int] = {}
    found = []
    for device in range(devices):
        part, place, _ = topology.coords(device)
        host = (part, *(at // size for at, size in zip(place, (*block, 1, 1), strict=False)))
        found.append(numbers.setdefault(host, len(numbers)))
    return np.array(found)


def _device_rate(topology: Topology) -> float:
    """Bytes per second that can reach one device over all of its links at once."""
    chip = topology.chip
    if topology.traits.shares_machine:
        return topology.memory_bytes_per_s
    links = 1
    if topology.traits.torus:
        sides = zip(topology.shape, topology.wrap, strict=True)
        links = max(1, sum((2 if size > 2 or wrap else 1) for size, wrap in sides if size > 1))
    network = chip.network_bytes_per_s_per_chip if topology.slices > 1 else 0.0
    return (links * chip.link_oneway_bytes_per_s + network) / topology.devices_per_chip
