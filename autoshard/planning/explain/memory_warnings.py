"""Warnings of a plan about memory: nearly full, allocated by JAX, of state that is not donated or copied, on hosts."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import format_bytes, format_seconds
from autoshard.cost import FRACTION, Topology, fraction_for
from autoshard.planning.price.device_memory import tight_seconds
from autoshard.planning.price.evaluate import Outcome, argument_bytes_on_host
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.decision_model import Model


TIGHT = 0.92
"""Share of the memory limit from which a plan warns that memory is tight."""
NOTICEABLE = 1e-3
"""Least share of the step from which a plan reports the seconds that tight memory adds."""
WORTH_DONATING = 0.01
"""Least share of the memory limit that a warning about donation or about copied stacks must save."""


def memory_warning(model: Model, outcome: Outcome, memory_limit: int) -> list[str]:
    """Return the warnings about tight memory and about the memory that JAX allocates; none if neither applies."""
    return [*_tight(model, outcome, memory_limit), *_granted(model.mesh.topology, outcome.peak_bytes)]


def _granted(topology: Topology, peak_bytes: float) -> list[str]:
    """Return a sentence if the step's peak needs more of a GPU's memory than JAX allocates by default, else nothing."""
    fraction = fraction_for(topology, peak_bytes)
    if fraction is None:
        return []
    total = topology.chip.hbm_bytes / topology.chip.devices_per_chip
    return [
        f"the step needs {format_bytes(peak_bytes)} of a GPU's {format_bytes(total)}, of which JAX allocates 75% "
        f"by default: set {FRACTION}={fraction:.2f} before Python starts."
    ]


def undonated_lines(model: Model, arguments: Mapping[str, Spec], memory_limit: int) -> list[str]:
    """Return a sentence about state that is live together with its replacement, if donating it saves at least
    `WORTH_DONATING` of the limit on each device.
    """
    sizes: dict[str, int] = {}
    for argument, tensor in zip(model.program.arguments, model.graph.arguments, strict=True):
        if argument.result is not None and not argument.donated:
            shape = arguments[argument.name].local_shape(argument.shape, dict(model.mesh.axes))
            sizes[argument.name] = math.prod(shape) * model.graph.tensors[tensor].itemsize
    if sum(sizes.values()) < WORTH_DONATING * memory_limit:
        return []
    first, others = max(sizes, key=lambda name: sizes[name]), len(sizes) - 1
    what = f"`{first}` is" if not others else f"`{first}` and {others} more arguments are"
    saved = format_bytes(sum(sizes.values()))
    return [f"{what} replaced by results and not donated: donate_argnums saves up to {saved} of each device's memory."]


def relaid_lines(model: Model, arguments: Mapping[str, Spec], memory_limit: int) -> list[str]:
    """Return a sentence about stacks that the compiler copies into another layout, if the copies need at least
    `WORTH_DONATING` of the limit on each device.
    """
    named = dict(zip(model.graph.arguments, model.program.arguments, strict=True))
    stacks = [(named[stack.source], stack) for stack in model.liveness.relaid if stack.source in named]
    sizes = {
        argument.name: math.prod(arguments[argument.name].local_shape(argument.shape, dict(model.mesh.axes)))
        * model.graph.tensors[stack.source].itemsize
        for argument, stack in stacks
    }
    if sum(sizes.values()) < WORTH_DONATING * memory_limit:
        return []
    argument, stack = max(stacks, key=lambda pair: sizes[pair[0].name])
    what = f"`{argument.name}`" if len(sizes) == 1 else f"`{argument.name}` and {len(sizes) - 1} more arguments"
    size = format_bytes(sum(sizes.values()))
    return [
        f"{what} of shape {list(argument.shape)} have other dims before the batch dims of their dots: "
        f"the compiler copies them around the loop ({size} more memory); a shape of {list(stack.better)} needs no copy."
    ]


def _tight(model: Model, outcome: Outcome, memory_limit: int) -> list[str]:
    """Return a sentence if memory is nearly full, else nothing.

    It names the seconds that this is expected to add, if they exceed `NOTICEABLE` of the step. Otherwise a peak above
    `TIGHT` of the limit gives it.
    """
    peak, step, topology = format_bytes(outcome.peak_bytes), outcome.step_time_s, model.mesh.topology
    tight = tight_seconds(model, outcome.peak_bytes, outcome.compute_s, outcome.hidden_s)
    if tight > NOTICEABLE * step:
        fails = "it may run out" if model.eager else "the compiler may recompute values or refuse"
        line = f"memory is tight: {peak} of the chip's {format_bytes(topology.usable_bytes)}; {fails}"
        return [f"{line}, which counts as {format_seconds(tight)} ({tight / step:.1%}) more a step."]
    if outcome.peak_bytes > TIGHT * memory_limit:
        return [f"memory is tight: {peak} of {format_bytes(memory_limit)}; the compiler may need to rematerialise."]
    return []


REMAT_LIMIT = "--xla_jf_rematerialization_percent_shared_memory_limit"
"""Flag of libtpu: share of a device's memory, in percent, above which the compiler recomputes values on its own."""


def host_warning(model: Model, choices: NDArray[np.int64], outcome: Outcome) -> list[str]:
    """Return a sentence if the TPU compiler will recompute values only because it counts arguments on the hosts as
    device memory.

    This is so if the peak fits without these arguments and exceeds the usable bytes with them. The sentence names the
    flag that raises the compiler's limit, in steps of 50 percent.
    """
    hosted = sum(argument_bytes_on_host(model, choices).values())
    usable = model.mesh.topology.usable_bytes
    if not hosted or not model.mesh.topology.traits.compiles_ahead or outcome.peak_bytes + hosted <= usable:
        return []
    # The flag counts 100 for the usable memory; the next multiple of 50 leaves some room.
    percent = 50 * math.ceil(2 * (outcome.peak_bytes + hosted) / usable)
    return [
        f"the compiler counts the {format_bytes(hosted)} of arguments on the hosts as memory of a device and "
        f"would recompute values to save memory: plan and run with `--xla-flags={REMAT_LIMIT}={percent}`."
    ]
