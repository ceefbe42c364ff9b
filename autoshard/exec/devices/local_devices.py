"""Devices of this machine: their order over a mesh, and the memory that they grant and retain."""

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
"""JAX's name for host memory from which devices can fetch."""

_COUNT = "--xla_force_host_platform_device_count"
"""XLA flag that sets the number of CPU devices."""
_THREADS = "PJRT_NPROC"
"""Environment variable for the number of threads of XLA's CPU client, which has at least as many as devices."""


def ensure_devices(count: int) -> None:
    """Ensure that JAX has at least `count` devices, CPU devices if it has no accelerator; start it if it is imported.

    Before JAX is imported, this only sets the flag in `XLA_FLAGS` and the number of threads in the environment. A
    larger count in the flag stays. Raises `UserError` if JAX, once imported, has fewer devices of any kind.
    """
    if not _started():
        # Batched LAPACK kernels (triangular solves, eigenvalues) block their device's thread until other threads share
        # the work. With no more threads than devices, all threads may block for ever.
        os.environ.setdefault(_THREADS, str(max(count + 1, os.cpu_count() or 1)))
    if "jax" not in sys.modules:
        flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_COUNT + "=")]
        counts = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith(_COUNT + "=")]
        present = max([1, *(int(flag.partition("=")[2]) for flag in counts if flag.partition("=")[2].isdigit())])
        os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT}={max(present, count)}"])
        return
    import jax

    if not _started() and f"{_COUNT}=" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX has started in spite of `_started`; its devices are counted below
            pass
    here = len(_devices())
    if here < count:
        raise UserError(
            f"{count} devices are needed but JAX has started with {here} ({jax.default_backend()}): "
            f"set XLA_FLAGS={_COUNT}={count} before anything imports jax, or run where {count} devices are."
        )


def _started() -> bool:
    """Return True if a JAX backend exists. A call of `jax.devices()` would create one."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    initialized = getattr(bridge, "backends_are_initialized", None)
    return bool(initialized()) if initialized is not None else False


def _devices() -> list[Any]:
    """Return the devices of JAX's default backend. Raises `UserError` if JAX cannot start that backend; other errors
    pass through.
    """
    import jax

    try:
        return jax.devices()
    except Exception as error:
        check_backend(error)
        raise


def plan_devices(plan: Plan, devices: Sequence[Any] | None = None) -> list[Any]:
    """Return the JAX devices of the plan's mesh in row-major order.

    A plan's device numbers are positions in its topology. Devices of a torus that have coordinates (TPUs) are matched
    by slice and coordinates, others by process and id. `devices` defaults to those of JAX's default backend; there may
    be more than needed. Raises `UserError` if there are too few, or if they do not form the topology.
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
    """Return the devices by their number in the topology; devices outside its shape are left out.

    Coordinates count from the least one of each slice; their axes are in the topology's order. Slices count in the
    order of their indices.
    """
    slices = sorted({getattr(device, "slice_index", 0) or 0 for device in pool})
    numbered = {}
    for position, index in enumerate(slices):
        members = [device for device in pool if (getattr(device, "slice_index", 0) or 0) == index]
        least = [min(device.coords[k] for device in members) for k in range(3)]
        for device in members:
            coords = tuple(device.coords[k] - least[k] for k in range(3))
            if all(c < size for c, size in zip(coords, topology.shape, strict=False)) and not any(
                coords[len(topology.shape) :]
            ):
                core = device.core_on_chip if topology.devices_per_chip > 1 else 0
                numbered[topology.device_at(position, coords, core)] = device
    return numbered


def jax_mesh(plan: Plan, devices: Sequence[Any] | None = None) -> Any:
    """Return the `jax.sharding.Mesh` with the plan's axes over `plan_devices`. Raises `UserError` as that does."""
    import jax
    import numpy as np

    grid = np.array(plan_devices(plan, devices), dtype=object).reshape(tuple(plan.mesh.values()))
    return jax.sharding.Mesh(grid, tuple(plan.mesh))


def named_sharding(mesh: Any, spec: Spec, on_host: bool = False) -> Any:
    """Return the `jax.sharding.NamedSharding` of a spec, in device memory or, with `on_host`, in the hosts' memory."""
    import jax

    return jax.sharding.NamedSharding(mesh, spec.partition_spec(), memory_kind=HOST_MEMORY if on_host else None)


def place(value: Any, sharding: Any) -> Any:
    """Put a host or device array under a sharding; return a global `jax.Array`.

    With several processes, every process has the whole value and copies only its own shards to its devices. An array
    that already spans processes is resharded.
    """
    import jax
    import numpy as np

    if sharding.is_fully_addressable or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(place(jax.random.key_data(value), sharding), impl=jax.random.key_impl(value))
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def check_granted(plan: Plan, compiled: Any, devices: Iterable[Any]) -> None:
    """Raise `UserError` if a compiled step needs more memory than JAX may use on a device.

    The need is arguments, results and temporaries, without aliased bytes. Only this process's first device in `devices`
    is asked. Devices that report no limit, such as CPUs, pass, and so does a step without a memory analysis.
    """
    import jax

    own = next((device for device in devices if device.process_index == jax.process_index()), None)
    if own is None:
        return
    granted, stats = (own.memory_stats() or {}).get("bytes_limit", 0), compiled.memory_analysis()
    if not granted or stats is None:
        return
    sizes = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
    # Results in the buffers of donated arguments need no memory of their own.
    needed = sum(sizes) - stats.alias_size_in_bytes
    if needed > granted:
        raise UserError(
            f"{plan.program_name} takes {format_bytes(needed)} of each device as compiled, and JAX was granted "
            f"{format_bytes(granted)} of it: {advice(plan, needed)}."
        )


def advice(plan: Plan, needed: float) -> str:
    """Return the change, as a clause of a message, that would let a step run that needs `needed` bytes of a device.

    A larger share of the memory for JAX is advised if the bytes fit the device, else a plan with less memory.
    """
    topology = Topology.parse(plan.topology)
    fraction = fraction_for(topology, needed)
    if fraction is not None and needed <= topology.usable_bytes:
        return f"set {FRACTION}={fraction:.2f} before Python starts, or plan with a --memory-limit"
    return "plan with a --memory-limit that fits, or for more devices"


# Parameters of `mallopt`, and the largest thresholds that glibc's dynamic adjustment sets. Source: malloc/malloc.c of
# 2.36, `DEFAULT_MMAP_THRESHOLD_MAX`, and twice that value for trimming.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_KEPT = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20, _MMAP_MAX: 0}
_USUAL = {_TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 0, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}


@contextlib.contextmanager
def retained_memory() -> Iterator[None]:
    """Make glibc retain freed memory within the `with` block, so that no step pays for fresh pages.

    XLA allocates the temporaries of a step on CPU in one piece for each device and frees them afterwards. Large freed
    pieces return from glibc to the system, which zeroes each page again when the next step touches it. The cost jumps
    with sizes around glibc's thresholds. Accelerators have no such cost: their memory is one pool. Other C libraries
    are left alone. After the block, free memory returns to the system.

    Evidence: docs/compiler_behaviour.md, "Page faults of XLA's CPU temporaries under glibc".
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
    """Return the C library of this process if it is glibc, else None; found once."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return None
    return libc
