"""The devices of this machine: their order over a mesh, and the memory that they grant and retain."""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autoshard.base.units import format_bytes
from autoshard.cost import FRACTION, Topology, fraction_for
from autoshard.errors import UserError
from autoshard.planning import Plan, Spec
from autoshard.program import check_backend


HOST_MEMORY = "pinned_host"
"""JAX's name for the memory of a host that its devices can fetch from."""

_COUNT = "--xla_force_host_platform_device_count"
_THREADS = "PJRT_NPROC"
"""How many threads XLA's CPU client makes, but no fewer than it has devices."""


def ensure_devices(count: int) -> None:
    """Make sure that JAX has at least `count` CPU devices, if it has no accelerator and has not started yet.

    Raises `UserError` if JAX has started with fewer.
    """
    if not _started():
        # Batched kernels of LAPACK (triangular solves, eigenvalues) wait in the thread of their device for others to
        # share the work: with no more threads than devices all may wait, and nobody works.
        os.environ.setdefault(_THREADS, str(max(count + 1, os.cpu_count() or 1)))
    if "jax" not in sys.modules:
        flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_COUNT + "=")]
        given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith(_COUNT + "=")]
        had = max([1, *(int(flag.partition("=")[2]) for flag in given if flag.partition("=")[2].isdigit())])
        os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT}={max(had, count)}"])
        return
    import jax

    if not _started() and f"{_COUNT}=" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX has started after all: what it has is checked below
            pass
    here = len(_devices())
    if here < count:
        raise UserError(
            f"{count} devices are needed but JAX has started with {here} ({jax.default_backend()}): "
            f"set XLA_FLAGS={_COUNT}={count} before anything imports jax, or run where {count} devices are."
        )


def _started() -> bool:
    """Whether any JAX backend has been made; asking `jax.devices()` would make one."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    initialized = getattr(bridge, "backends_are_initialized", None)
    return bool(initialized()) if initialized is not None else False


def _devices() -> list[Any]:
    """Return the devices of JAX's default backend. Raises `UserError` if JAX cannot start the one it is asked for."""
    import jax

    try:
        return jax.devices()
    except Exception as error:
        check_backend(error)
        raise


def plan_devices(plan: Plan, devices: Sequence[Any] | None = None) -> list[Any]:
    """JAX devices row-major over the plan's mesh.

    A plan's device numbers are positions in its topology: TPUs are found by slice and coordinates, other devices
    by process and id. `devices` are those of JAX's default backend unless given; more than needed is allowed.
    Raises `UserError` if there are too few.
    """
    pool = list(_devices() if devices is None else devices)
    needed = len(plan.device_order)
    if len(pool) < needed:
        kind = pool[0].platform if pool else "no"
        hint = f" (for CPU devices set XLA_FLAGS={_COUNT}={needed} before jax starts)" if kind == "cpu" else ""
        raise UserError(
            f"the plan is for {plan.topology} with {needed} devices, but JAX sees {len(pool)} {kind} devices{hint}."
        )
    topology = Topology.parse(plan.topology)
    if topology.traits.torus and all(hasattr(device, "coords") for device in pool):
        numbered = by_coordinates(topology, pool)
    else:
        numbered = dict(enumerate(sorted(pool, key=lambda device: (device.process_index, device.id))))
    missing = [number for number in plan.device_order if number not in numbered]
    if missing:
        raise UserError(
            f"the plan is for {plan.topology}, but the devices here do not form that shape: "
            f"there is none at {topology.coords(missing[0])} (slice, coordinates, core)."
        )
    return [numbered[number] for number in plan.device_order]


def by_coordinates(topology: Topology, pool: Sequence[Any]) -> dict[int, Any]:
    """Devices by number; coordinates count from the least one of each slice, axes in the topology's order."""
    slices = sorted({getattr(device, "slice_index", 0) or 0 for device in pool})
    numbered = {}
    for position, index in enumerate(slices):
        mine = [device for device in pool if (getattr(device, "slice_index", 0) or 0) == index]
        least = [min(device.coords[k] for device in mine) for k in range(3)]
        for device in mine:
            coords = tuple(device.coords[k] - least[k] for k in range(3))
            if all(c < size for c, size in zip(coords, topology.shape, strict=False)) and not any(
                coords[len(topology.shape) :]
            ):
                core = device.core_on_chip if topology.devices_per_chip > 1 else 0
                numbered[topology.device_at(position, coords, core)] = device
    return numbered


def jax_mesh(plan: Plan, devices: Sequence[Any] | None = None) -> Any:
    """`jax.sharding.Mesh` with the plan's axes over `plan_devices`."""
    import jax
    import numpy as np

    grid = np.array(plan_devices(plan, devices), dtype=object).reshape(tuple(plan.mesh.values()))
    return jax.sharding.Mesh(grid, tuple(plan.mesh))


def named_sharding(mesh: Any, spec: Spec, on_host: bool = False) -> Any:
    """`jax.sharding.NamedSharding` of a spec, of what is on the devices or in the memory of their hosts."""
    import jax

    return jax.sharding.NamedSharding(mesh, spec.partition_spec(), memory_kind=HOST_MEMORY if on_host else None)


def place(value: Any, sharding: Any) -> Any:
    """A host or device array where a sharding wants it; with several processes each puts its own shards.

    Every process holds the whole value; only its own part is copied to its devices.
    """
    import jax
    import numpy as np

    if sharding.is_fully_addressable or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(place(jax.random.key_data(value), sharding), impl=jax.random.key_impl(value))
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def check_granted(plan: Plan, compiled: Any, devices: Iterable[Any]) -> None:
    """Raise `UserError` if a compiled step needs more memory than JAX may use of a device, before it is run.

    Asks this process's first device. Says nothing of devices that do not say how much that is, such as CPUs.
    """
    import jax

    own = next((device for device in devices if device.process_index == jax.process_index()), None)
    if own is None:
        return
    granted, stats = (own.memory_stats() or {}).get("bytes_limit", 0), compiled.memory_analysis()
    if not granted or stats is None:
        return
    sizes = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
    needed = sum(sizes) - stats.alias_size_in_bytes
    if needed > granted:
        raise UserError(
            f"{plan.program_name} takes {format_bytes(needed)} of each device as compiled, and JAX was granted "
            f"{format_bytes(granted)} of it: {advice(plan, needed)}."
        )


def advice(plan: Plan, needed: float) -> str:
    """Return what would let a step run that needs so many bytes of a device."""
    topology = Topology.parse(plan.topology)
    fraction = fraction_for(topology, needed)
    if fraction is not None and needed <= topology.usable_bytes:
        return f"set {FRACTION}={fraction:.2f} before Python starts, or plan with a --memory-limit"
    return "plan with a --memory-limit that fits, or for more devices"


# Parameters of `mallopt`, and the largest values that glibc gives the thresholds by itself (malloc/malloc.c, 2.36:
# `DEFAULT_MMAP_THRESHOLD_MAX`, and twice that to trim).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_KEPT = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20, _MMAP_MAX: 0}
_USUAL = {_TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 0, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """While the body runs, memory that was freed stays with this process, so that no step pays for fresh pages.

    XLA asks for the temporaries of a step on CPU devices in one piece a device and frees them afterwards. glibc gives
    large pieces back to the system, which zeroes every page again that the next step touches: 8 devices of 28 MB spent
    a fifth of their step there, more or less as sizes fell on either side of glibc's thresholds. No accelerator does,
    whose memory is one pool from the start. Does nothing with another C library. Afterwards what is free goes back.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    for parameter, value in _KEPT.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _USUAL.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    """The C library of this process if it is glibc."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return None
    return libc
