"""Compare the memory that a compiled step needs with what JAX may use of a device."""

from collections.abc import Iterable
from typing import Any

from autoshard.cost import FRACTION, Topology, fraction_for
from autoshard.errors import UserError
from autoshard.plan import Plan
from autoshard.units import format_bytes


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
