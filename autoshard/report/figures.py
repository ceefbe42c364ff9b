"""The figures of a plan as plain values: printed by `--json`, and displayed by every report."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from autoshard.base.units import dtype_bits, format_seconds
from autoshard.errors import UserError
from autoshard.planning import Plan, Prediction, Recipe, chosen_options, shortened
from autoshard.program import parse_lora, parse_remat


WHOLE_AXES = "Axes of these meshes are whole; one that --mesh names may be cut into parts, and then be faster."
"""Sentence below the meshes that a search did not choose."""

UNSOLVED_SHOWN = 6
"""Most meshes without a solution that are named; the rest is counted."""


def mesh_notes(plan: Plan) -> list[str]:
    """Return sentences on the plan's other meshes: whether they have its form and recipe, and that their axes are
    whole.
    """
    own_s = plan.meshes[0].step_time_s if plan.meshes else None
    form = f" without the {plan.origin.form} form" if plan.origin.form else ""
    other = None if plan.recipe is None or not plan.recipe.meshes_of else Recipe(tuple(plan.recipe.meshes_of.items()))
    recipe = f" with {shortened(str(other))}" if other else ""
    if own_s is None or not form + recipe:
        return [WHOLE_AXES]
    own = format_seconds(own_s)
    return [f"These are plans{form}{recipe}, in which the chosen mesh takes {own}.", WHOLE_AXES]


def recipe_seconds(row: Mapping[str, Any]) -> float | None:
    """Return the step time of a tried recipe by which it was ranked: that in eager torch where it is known."""
    seconds: float | None = row.get("eager_step_time_s", row["step_time_s"])
    return seconds


def recipe_heading(plan: Plan) -> str:
    """Return the heading of the step times of the plan's recipes."""
    tried = () if plan.recipe is None else plan.recipe.tried
    return "eager step" if any("eager_step_time_s" in row for row in tried) else "step"


def unsolved_meshes(plan: Plan) -> str:
    """Return a sentence on the meshes that were too large to solve, with their least bound; empty without any."""
    unsolved = [tried for tried in plan.meshes[1:] if tried.unsolved]
    if not unsolved:
        return ""
    names = "; ".join(tried.mesh for tried in unsolved[:UNSOLVED_SHOWN])
    more = f" and {len(unsolved) - UNSOLVED_SHOWN} more" if len(unsolved) > UNSOLVED_SHOWN else ""
    least = format_seconds(min(tried.bound_s or 0.0 for tried in unsolved))
    return f"not solved, as too large: {names}{more}, at least {least} a step. Name one by --mesh to solve it."


def plan_figures(plan: Plan, wall_s: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the object that `autoshard plan --json` prints. Times are in seconds, sizes in bytes of one device.

    `wall_s` is the duration of each phase of planning, which a saved plan does not know; without it the entry is
    absent. Unknown or unbounded figures are `None`.
    """
    figures: dict[str, Any] = {
        "program": plan.program_name,
        "topology": plan.topology,
        "mesh": dict(plan.mesh),
        **prediction_figures(plan.prediction),
        "time_error": None if plan.time_error is None else dataclasses.asdict(plan.time_error),
        "tokens_per_s": plan.tokens_per_s,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "solver_gap": _finite(plan.solver_gap),
        "plan_gap": _finite(plan.plan_gap),
        "objective": plan.objective,
        "lower_bound": plan.lower_bound,
        "words": list(plan.words),
        "recipe_line": recipe_line(plan),
        "prices_line": learned_line(plan),
        "fixed": list(fixed_lines(plan)),
        "baselines": {name: prediction_figures(baseline) for name, baseline in plan.baselines.items()},
        "recipe": plan.provenance.get("recipe"),
        "pipeline": pipeline_figures(plan),
        "meshes": [dataclasses.asdict(each) for each in plan.meshes],
        "warnings": list(plan.warnings),
        "unruled": [dataclasses.asdict(each) for each in plan.unruled],
        "unsure": [dataclasses.asdict(each) for each in plan.unsure],
    }
    if plan.compiled is not None:
        figures["compiled"] = compiled_figures(plan)
    if wall_s is not None:
        figures["wall_s"] = {phase: round(seconds, 4) for phase, seconds in wall_s.items()}
    return figures


def compiled_figures(plan: Plan) -> dict[str, Any]:
    """Return the compiled figures of a plan with its predictions, as `autoshard compile --json` names them; an empty
    object for a plan that was saved without them.
    """
    own, found = plan.prediction, plan.compiled
    if found is None:
        return {}
    return {
        "verdict": found.verdict,
        "peak_bytes": {
            "predicted": own.peak_bytes,
            "compiled": found.peak_bytes,
            "reserved": found.reserved_bytes,
        },
        "step_time_s": {
            "predicted": own.step_time_s,
            "estimated": found.step_time_s,
            "error": found.error,
            "followed": found.followed,
            "undecided": found.undecided,
        },
        "wire_bytes": {
            axis: {"predicted": own.wire_bytes.get(axis, 0), "compiled": found.wire_bytes.get(axis, 0)}
            for axis in sorted({*own.wire_bytes, *found.wire_bytes})
        },
    }


_KERNELS = {"splash": "splash attention", "cudnn_attention": "cuDNN attention", "ring": "ring attention"}
"""Parts of names of custom calls, and what the recipe line says of them."""


def quantized(plan: Plan) -> str:
    """Return the dtype of 8 bits in which a plan's matmuls multiply; "" if they are not quantized."""
    found = str(chosen_options(plan).get("quantize") or "none")
    return "" if found == "none" else found


def recipe_line(plan: Plan) -> str:
    """Return the decisions of the step besides mesh and sharding in a line: attention, recomputation, dtypes.

    A decision that the plan neither records nor shows in the names of its ops is left out.
    """
    options = given = {} if plan.source is None else dict(plan.source.options)
    trained = {"remat": "none", "optimizer": "adamw"} if options.get("train") else {}
    if plan.source is not None and plan.source.is_configuration:
        options = trained | {"dtype": "bfloat16"} | options
    else:  # older plans do not say the dtype; a module computes in that of its parameters
        dtype = plan.origin.computes_in or (largest_dtype(plan, "parameter") if trained else "")
        options = trained | {"dtype": dtype} | options
    options |= {} if plan.recipe is None else plan.recipe.chosen
    called = {word for call in plan.calls for part, word in _KERNELS.items() if part in call.name}
    scores = any(row.kind in ("exponential", "exp") for row in plan.ops) and not called
    attention = sorted(called) or (["attention in memory"] if options.get("attention") == "plain" and scores else [])
    words = [*attention]
    unasked = trained and plan.recipe is None and "remat" not in given
    more = " since it fits, and recomputing spares little (--remat auto looks for faster recipes)" if unasked else ""
    words += [f"remat {remat_words(str(options['remat']))}{more}"] if options.get("remat") else []
    words += [f"{name} {value}" for name in ("microbatches", "host") if (value := options.get(name))]
    words += [f"LoRA {options['lora']}"] if options.get("lora") else []
    padding = str(options.get("pad") or "none")
    words += [f"padded to multiples of {padding.replace(',', ' and ')}"] if padding != "none" else []
    words += [f"loss in chunks, {options['loss_chunks']}"] if options.get("loss_chunks") else []
    words += [f"sampling {str(options['sample']).replace(',', ' and ')}"] if options.get("sample") else []
    words += [f"matmuls in {narrow}"] if (narrow := quantized(plan)) else []
    words += _found_in(plan, options)
    words += [options["optimizer"]] if options.get("optimizer") else []
    rounded = f" ({plan.origin.multiplies_in} in matmuls)" if plan.origin.multiplies_in else ""
    words += [f"{options['dtype']}{rounded}"] if options.get("dtype") else []
    by_role = {role: largest_dtype(plan, role) for role in ("parameter", "frozen", "optimizer_state")}
    base = parse_lora(str(options["lora"])).base if options.get("lora") else ""
    if base and by_role["frozen"] == "int8":  # codes of 4 bits are stored in pairs
        by_role["frozen"] = base
    named = {"parameter": "parameters", "frozen": "frozen parameters", "optimizer_state": "optimizer state"}
    stored = {dtype for dtype in by_role.values() if dtype}
    if len(stored) == 1:
        words += [f"stored in {stored.pop()}"]
    else:
        words += [f"{named[role]} {dtype}" for role, dtype in by_role.items() if dtype]
    words += default_sizes(plan)
    return ", ".join(map(str, words)) or "no parameters"


def remat_words(text: str) -> str:
    """Return a recomputation as words: `dots in 27 layers, then none` for `dots:27+none`, one policy as it is."""
    try:
        *first, (last, _) = parse_remat(text).parts
    except UserError:  # a choice of the program's own
        return text
    return ", then ".join([*(f"{policy} in {count} layers" for policy, count in first), last])


_LOOPED_GRADIENT = re.compile(r"while/body.*transpose\(jvp")
"""Pattern of the names of a gradient's ops in a loop around the whole gradient; a loop over layers is inside of it."""


def _found_in(plan: Plan, options: Mapping[str, Any]) -> list[str]:
    """Return the decisions that the names of the step's ops show, if `options` do not state them.

    They are recomputation, and gradients in a loop, as those of microbatches are.
    """
    names = [row.name for row in plan.ops]
    words = []
    if not options.get("remat") and any("rematted_computation" in name for name in names):
        words.append("values recomputed")
    if not options.get("microbatches") and any(_LOOPED_GRADIENT.search(name) for name in names):
        words.append("gradients in a loop")
    return words


def default_sizes(plan: Plan) -> list[str]:
    """Return the sizes of an `hf:` program that the user did not give: `batch 8, seq 1024 (defaults)`.

    The list has at most one entry. Serving steps read one token of a sequence, so their length is that of the cache.
    """
    source = plan.source
    if source is None or not source.is_configuration:
        return []
    given = dict(source.options) | ({} if plan.recipe is None else plan.recipe.chosen)
    shapes = [plan.shapes[name] for name, role in plan.roles.items() if role == "batch" and plan.shapes.get(name)]
    sizes = {"batch": max((shape[0] for shape in shapes), default=0)}
    if plan.origin.tokens and not given.get("serve"):
        rows = [shape[1] for shape in shapes if len(shape) == 2]
        sizes["seq"] = max(rows, default=0)
    left = [f"{name} {size}" for name, size in sizes.items() if size and given.get(name) is None]
    noun = "default" if len(left) == 1 else "defaults"
    return [f"{', '.join(left)} ({noun})"] if left else []


def largest_dtype(plan: Plan, role: str) -> str:
    """Return the dtype of most bytes of the arguments of a role; empty if there are none."""
    sizes = defaultdict[str, int](int)
    for name in plan.arguments:
        if plan.roles.get(name) == role:
            sizes[plan.dtypes[name]] += tensor_bytes(plan.shapes[name], plan.dtypes[name])
    return max(sizes, key=lambda dtype: sizes[dtype], default="")


def pipeline_figures(plan: Plan) -> dict[str, Any] | None:
    """Return the fields of a plan's pipeline, with step time in seconds, bubble and microbatches in flight.

    The bubble is a fraction of the stages' time. None without a pipeline.
    """
    if plan.pipeline is None:
        return None
    timetable = plan.pipeline.timetable()
    timing = {
        "step_time_s": timetable.step_time_s,
        "bubble": plan.pipeline.bubble(timetable),
        "in_flight": timetable.in_flight,
    }
    return dataclasses.asdict(plan.pipeline) | timing


def prediction_figures(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain values: seconds, bytes and fractions; None for an unknown or infinite figure."""
    return {
        "step_time_s": _finite(prediction.step_time_s),
        "compute_s": _finite(prediction.compute_s),
        "hidden_comm_s": _finite(prediction.hidden_comm_s),
        "exposed_comm_s": _finite(prediction.exposed_comm_s),
        "tight_s": _finite(prediction.tight_s),
        "mfu": _finite(prediction.mfu),
        "peak_bytes": prediction.peak_bytes,
        "fits": prediction.fits,
        "memory": dict(prediction.memory),
        "wire_bytes": dict(prediction.wire_bytes),
    } | {
        name: value
        for name in ("eager_step_time_s", "eager_peak_bytes")
        if (value := getattr(prediction, name)) is not None
    }


def best_baseline(plan: Plan) -> tuple[str, Prediction] | None:
    """Return (name, prediction) of the fastest baseline that fits; None if none fits.

    If the plan's time in eager torch is known, only baselines with such a time count, and are compared by it.
    """
    fitting = [item for item in plan.baselines.items() if item[1].fits and _is_comparable(plan, item[1])]
    return min(fitting, key=lambda item: item[1].compared_s, default=None)


def _is_comparable(plan: Plan, baseline: Prediction) -> bool:
    """Return True unless only the plan's time in eager torch is known, and not the baseline's."""
    return plan.prediction.eager_step_time_s is None or baseline.eager_step_time_s is not None


def ordered_baselines(plan: Plan) -> list[tuple[str, Prediction]]:
    """Return names and predictions of the baselines by the seconds that are compared.

    Baselines that do not fit, or that the plan's form cannot hold, are last.
    """
    return sorted(
        plan.baselines.items(),
        key=lambda item: (not item[1].fits, not _is_comparable(plan, item[1]), item[1].compared_s),
    )


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the size of a whole tensor in bytes, rounded up: `bfloat16` has 2 per element, `int4` half, `bool` one.

    A `key<fry>` has 8.
    """
    return math.ceil(math.prod(shape) * dtype_bits(dtype) / 8)


def _finite(value: float | None) -> float | None:
    """Return the value, or None for an infinite one and NaN."""
    return value if value is not None and math.isfinite(value) else None


SHOWN = 6
"""Number of the program's own specs that are listed; the rest is counted."""


def learned_line(plan: Plan) -> str:
    """Return a sentence on the figures of the prices if `autoshard refine` learned them; empty for shipped ones."""
    count = plan.origin.observations
    if not count:
        return ""
    many = "observation" if count == 1 else "observations"
    return f"figures fitted to {count} {many} of {plan.topology} by autoshard refine; --no-calibration ignores them"


def fixed_lines(plan: Plan) -> tuple[str, ...]:
    """Return one line for each thing that the user asked for, then for each spec that the program fixes.

    The first `SHOWN` of the program's own specs are listed, and the rest is counted in a last line.
    """
    origin, lines = plan.origin, []
    for asked in origin.asked:
        count = sum(asked in why for why in origin.pinned.values())
        lines.append(f"pinned by you: {asked}" + (f" ({count} tensor{'s' if count > 1 else ''})" if count else ""))
    stated = origin.program_constraints
    lines += [f"fixed by the program: {line}" for line in stated[:SHOWN]]
    if len(stated) > SHOWN:
        lines.append(f"and {len(stated) - SHOWN} more fixed by the program")
    return tuple(lines)
