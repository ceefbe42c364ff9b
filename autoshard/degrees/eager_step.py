"""Step time of a plan's form in eager torch, priced as degrees of parallelism."""

import math
from collections import Counter

from autoshard.base.providers import provides
from autoshard.cost import Topology
from autoshard.degrees.degree_choice import gpu_decoder
from autoshard.degrees.gpu_run import GpuRun
from autoshard.degrees.gpu_stage import host_figures
from autoshard.degrees.gpu_step import price_step
from autoshard.errors import UserError
from autoshard.planning import FORMS, Plan, chosen_options
from autoshard.program import parse_remat


_RECOMPUTED = {"none": "none", "dots": "matmuls", "full": "full"}
"""Remat policies -> recomputation in eager frameworks."""
_FRAMEWORKS = {"fsdp2": "dtensor", "torchtitan": "styles", "transformers": "styles"}
"""Forms with tensor parallelism -> framework that runs their code."""


@provides("eager_price")
def eager_step_s(plan: Plan) -> float | None:
    """Return the seconds of a plan's step in eager torch on GPUs, as `choose_degrees` prices torchtitan's.

    Unlike torchtitan's own, the code of these forms keeps values whole between split matmuls.

    Return None for a form that does not gather parameters, and for a plan that degrees cannot state. The program must
    be a dense decoder's configuration, with matmuls in 16 bits and remat policies of `_RECOMPUTED`. A mixture of them
    takes the mean over its layers.
    """
    form, source, labels = FORMS.get(plan.origin.form or ""), plan.source, plan.shapes.get("batch.labels")
    if form is None or not form.gathers or source is None or not source.is_configuration or not labels:
        return None
    options, place = chosen_options(plan), Topology.parse(plan.topology)
    if any(options.get(name) not in (None, "none") for name in ("quantize", "lora")):
        return None
    if place.chip.name not in host_figures().attention_efficiency["flash"]:
        return None
    replicas = math.prod(plan.mesh[axis] for axis in plan.batch_axes)
    micro, batch = int(options.get("microbatches") or 1), math.prod(labels[:-1])
    split = {axis for name, spec in plan.arguments.items() if plan.is_weight(name) for axis in spec.axes}
    copied = [axis for axis in plan.batch_axes if axis not in split]  # FSDP copies parameters over these axes
    tp, copies = place.num_devices // replicas, math.prod(plan.mesh[axis] for axis in copied)
    inner = copied != list(plan.batch_axes[: len(copied)])
    framework = _FRAMEWORKS.get(form.name, "torchtitan")
    try:
        decoder = gpu_decoder(source.program)
        if decoder.experts > 1 or batch % (replicas * micro):
            return None
        remat = parse_remat(str(options.get("remat") or "none"))
        policies = [str(remat.of(number)) for number in range(decoder.layers)]
        if not _RECOMPUTED.keys() >= set(policies):
            return None
        layers = Counter(_RECOMPUTED[policy] for policy in policies)
        runs = {
            recompute: GpuRun(
                decoder, place, framework, labels[-1], replicas, tp, 1, batch // replicas // micro, micro, 3, recompute,
                copies=copies, inner_copies=inner,
            )
            for recompute in layers
        }  # fmt: skip
    except UserError:
        return None
    return sum(price_step(run).seconds * layers[recompute] for recompute, run in runs.items()) / decoder.layers
