"""Readers of the options, pipeline stages and chips that a measured group states in words."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.cost import CLOCK, HIGHEST_STATE, Chip, Topology, chip_names, load_chip
from autoshard.degrees.gpu_run import gpu_topology
from autoshard.errors import UserError
from autoshard.program import GroupedTiles, Pipeline, read_pipeline
from autoshard.validation.pair_dims import whole_number
from autoshard.validation.published_runs import IncompleteError, Run, made_of, slice_shape


OPTIONS: dict[str, Callable[[Run, Any], Run]] = {}
"""Keys of a plan other than its mesh -> function that changes the run by the value; applied in this order."""

METHODS = {"all-gather": "gather", "ulysses": "heads", "ring": "ring"}
"""Context parallelism by MaxText's names -> exchange of attention."""


def _context_method(run: Run, value: Any) -> Run:
    """Set the exchange of attention over a split sequence; a run without context parallelism stays unchanged.

    Raises `IncompleteError` for a value that is not in `METHODS`, as all functions of `OPTIONS` do for theirs.
    """
    if value not in METHODS:
        raise IncompleteError(f"cp_method={value} is not rebuilt; {', '.join(METHODS)} are")
    return dataclasses.replace(run, exchange=METHODS[value]) if run.context > 1 else run


def _balanced(run: Run, value: Any) -> Run:
    """Set the balanced order of tokens under context parallelism."""
    if not isinstance(value, bool):
        raise IncompleteError(f"load_balanced={value} is neither true nor false")
    return dataclasses.replace(run, balanced=value)


def _head(run: Run, value: Any) -> Run:
    """Set the dim of the head's weights that FSDP splits: the width for a value with `embed`.

    A value with `vocab` changes nothing, since the vocabulary is the default.
    """
    if "vocab" in str(value):
        return run
    if "embed" in str(value):
        return dataclasses.replace(run, head_on_width=True)
    raise IncompleteError(f"lm_head={value} is not rebuilt")


def _scan_axis(run: Run, value: Any) -> Run:
    """Set the dim of stacked parameters that counts layers (MaxText's `param_scan_axis`)."""
    if not isinstance(value, int) or isinstance(value, bool) or value not in (0, 1):
        raise IncompleteError(f"param_scan_axis={value} is not rebuilt; 0 and 1 are")
    return dataclasses.replace(run, stack_axis=value)


def _scanned(run: Run, value: Any) -> Run:
    """Set the form of the layers: True for a loop over stacked parameters, False for unrolled layers."""
    if not isinstance(value, bool):
        raise IncompleteError(f"scan_layers={value} is neither true nor false")
    return dataclasses.replace(run, scanned=value)


def _routing(run: Run, value: Any) -> Run:
    """Set the routing of experts.

    Dropping states its slots as a capacity factor. Dropless kernels state their tiles, by default MaxText's, and are
    assumed to have balanced experts. Only megablox and tokamax's tiled kernels are known; other texts raise
    `IncompleteError`.
    """
    text = str(value)
    slots = re.search(r"dropping.*?cf ([\d.]+)", text)
    if slots is not None:
        return dataclasses.replace(run, capacity=float(slots[1]))
    if "ring dispatch" in text and run.experts == 1:  # nothing is sent: matmuls have the size of balanced experts
        return dataclasses.replace(run, assumed=(*run.assumed, "experts that share the tokens evenly"))
    named = re.search(r"tile \(?(\d+)[,/] ?(\d+)[,/] ?(\d+)", text)
    if named is None and re.search(r"tile|gmm", text) and "default tile" not in text:
        raise IncompleteError(f"moe={value}: tiles of kernels are not rebuilt")
    if named is not None or run.decoder.experts == 1 or "dropless" in text or "megablox" in text:
        assumed = (*run.assumed, "experts that share the tokens evenly")
        tiles = GroupedTiles() if named is None else GroupedTiles(*map(int, named.groups()))
        return dataclasses.replace(run, tiles=tiles, assumed=assumed)
    raise IncompleteError(f"moe={value} is not rebuilt")


def _tiles(run: Run, value: Any) -> Run:
    """Set one triple of tile sizes, such as `128/1024/1024`, for all expert kernels."""
    named = re.fullmatch(r"(\d+)/(\d+)/(\d+)( x 6 paths)?", str(value))
    if named is None:
        raise IncompleteError(f"moe_tiles={value} is not rebuilt")
    return dataclasses.replace(run, tiles=GroupedTiles(*map(int, named.groups()[:3])))


def _inner_tile(run: Run, value: Any) -> Run:
    """Set the tile along the experts' inner width; the other sizes stay, by default MaxText's."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise IncompleteError(f"moe_tile_mlp={value} is not a whole number above 0")
    return dataclasses.replace(run, tiles=dataclasses.replace(run.tiles or GroupedTiles(), inner=value))


def _microbatches(run: Run, value: Any) -> Run:
    """Set the number of microbatches whose gradients are accumulated; it must divide the batch."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or run.batch % value:
        raise IncompleteError(f"gradient_accumulation={value} does not divide a batch of {run.batch}")
    return dataclasses.replace(run, accumulation=value)


def _gathered(run: Run, value: Any) -> Run:
    """Set, by True or False, that weights are gathered once a step and stay gathered for the backward pass."""
    if not isinstance(value, bool):
        raise IncompleteError(f"keep_gathered_weights={value} is neither true nor false")
    return dataclasses.replace(run, keeps_gathered=value)


def _spread_state(run: Run, value: Any) -> Run:
    """Set, by True or False, that the optimizer state is spread over the copies of the parameters (ZeRO-1).

    True is for data parallelism alone.
    """
    if not isinstance(value, bool):
        raise IncompleteError(f"zero1={value} is neither true nor false")
    if value and (run.copies == 1 or run.spread * run.tensor * run.experts > 1):
        raise IncompleteError("zero1 with degrees other than data parallelism is not rebuilt")
    return dataclasses.replace(run, spreads_state=value)


def _summed_late(run: Run, value: Any) -> Run:
    """Set, by True or False, that gradients are summed once, after the backward passes of all microbatches.

    True is for data parallelism alone, with microbatches that its degree divides.
    """
    if not isinstance(value, bool):
        raise IncompleteError(f"deferred_grad_allreduce={value} is neither true nor false")
    if value and (run.copies == 1 or run.spread * run.tensor * run.experts > 1):
        raise IncompleteError("deferred_grad_allreduce with degrees other than data parallelism is not rebuilt")
    if value and run.batch // run.accumulation % run.copies:
        raise IncompleteError(f"a microbatch of {run.batch // run.accumulation} does not divide by dp={run.copies}")
    return dataclasses.replace(run, sums_late=value)


def _clock(run: Run, value: Any) -> Run:
    """Set the state of a TPU's clock, 0 to `HIGHEST_STATE`, by adding the compiler's flag for it."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= HIGHEST_STATE:
        raise IncompleteError(f"dvfs={value} is no state of a clock, 0 to {HIGHEST_STATE}")
    return dataclasses.replace(run, flags=(*run.flags, f"--{CLOCK}={value}"))


OPTIONS["cp_method"] = _context_method
OPTIONS["load_balanced"] = _balanced
OPTIONS["dvfs"] = _clock
OPTIONS["zero1"] = _spread_state
OPTIONS["keep_gathered_weights"] = _gathered
OPTIONS["gradient_accumulation"] = _microbatches
OPTIONS["lm_head"] = _head
OPTIONS["moe"] = _routing
OPTIONS["moe_tiles"] = _tiles  # after `moe`, whose tiles it replaces
OPTIONS["moe_tile_mlp"] = _inner_tile  # after `moe_tiles`, of whose tiles it changes one dim
OPTIONS["param_scan_axis"] = _scan_axis
OPTIONS["scan_layers"] = _scanned
OPTIONS["deferred_grad_allreduce"] = _summed_late  # after `gradient_accumulation`, whose microbatches it checks


MICROBATCHES = ("num_pipeline_microbatches", "microbatches")
"""Keys for the number of a pipeline's microbatches, of which a plan may state one."""
ROUNDS = "num_pipeline_repeats"
LAYERS = "num_layers_per_pipeline_stage"
SCHEDULE = "schedule"
"""Keys for a pipeline's rounds, for the layers of a chunk, and for its schedule by our name."""
NETWORK = {"dcn_dp": "data", "dcn_pp": "stage", "dcn_fsdp": "fsdp"}
"""Keys for the number of slices that a degree spans -> mesh axis of that degree."""
STAGED = frozenset({*MICROBATCHES, ROUNDS, LAYERS, SCHEDULE, *NETWORK})
"""Keys of a plan that `staged` reads."""


def staged(run: Run, said: Mapping[str, Any], stages: int) -> Run:
    """Return the run with its layers in `stages` pipeline stages, and with the mesh axes that span its slices.

    With one stage only the axes are set.

    A plan without a number of microbatches has one for each stage. In MaxText a plan without `num_pipeline_repeats` has
    as many rounds as a stage has chunks of `num_layers_per_pipeline_stage` layers, by default of one layer. A plan that
    states neither key and no framework has one round. Raises `IncompleteError` for a pipeline that is impossible or not
    rebuilt.
    """
    run = dataclasses.replace(run, network=_network(said, run.topology))
    if stages == 1:
        return run
    framework = str(said.get("framework", ""))
    if framework and "maxtext" not in framework.lower() and SCHEDULE not in said:
        raise IncompleteError(f"pp={stages}: how {framework} runs stages is not stated, and not rebuilt")
    counts = [whole_number(said, key) for key in MICROBATCHES if key in said]
    if len(set(counts)) > 1:
        raise IncompleteError(f"{' and '.join(MICROBATCHES)} are stated differently, {counts[0]} and {counts[1]}")
    layers = (run.decoder.layers - run.decoder.dense_layers) // run.decoder.global_every
    try:
        pipeline = read_pipeline(stages, counts[0] if counts else None, _schedule(said, stages, layers))
    except UserError as error:
        raise IncompleteError(str(error)) from None
    assert pipeline is not None
    microbatch = run.batch // run.accumulation
    if microbatch % pipeline.microbatches:
        raise IncompleteError(f"{pipeline.microbatches} microbatches do not divide {microbatch} sequences")
    return dataclasses.replace(run, pipeline=pipeline, assumed=(*run.assumed, *_assumed(pipeline, layers)))


def _schedule(said: Mapping[str, Any], stages: int, layers: int) -> str:
    """Return the stated pipeline schedule, or the one that follows from the numbers of rounds and layers.

    It is `gpipe` for one round, else `circular:ROUNDS`. `layers` are those that stages can have. Raises
    `IncompleteError` if there are fewer than the keys need.
    """
    if SCHEDULE in said:
        return str(said[SCHEDULE])
    if ROUNDS in said:
        rounds = whole_number(said, ROUNDS)
        own = whole_number(said, LAYERS, layers // (stages * rounds) or 1)
        if LAYERS in said and stages * own * rounds > layers:
            what = f"{ROUNDS}={rounds} with {LAYERS}={own} in {stages} stages"
            raise IncompleteError(f"{what} are more than {layers} layers")
    elif LAYERS not in said and "framework" not in said:
        return "gpipe"
    else:
        rounds = layers // (stages * whole_number(said, LAYERS, 1))
    if rounds < 1:
        raise IncompleteError(f"{LAYERS}={said.get(LAYERS, 1)} in {stages} stages are more than {layers} layers")
    return f"circular:{rounds}" if rounds > 1 else "gpipe"


def _assumed(pipeline: Pipeline, layers: int) -> list[str]:
    """List, as text, the assumptions about a pipeline of `layers` layers that its source does not state."""
    assumptions = []
    if pipeline.outside(layers):
        assumptions.append(f"{pipeline.outside(layers)} of {layers} layers before the stages")
    if pipeline.rounds(layers) > 1:
        assumptions.append("weights of all rounds brought to their stages once a step")
    return assumptions


def _network(said: Mapping[str, Any], topology: Topology) -> tuple[tuple[str, int], ...]:
    """Return (mesh axis, number of slices that it spans) for axes that span several; empty if the plan states none.

    The first axes span the slices if the result is empty. Raises `IncompleteError` if the numbers do not multiply to
    the topology's slices.
    """
    spans = {axis: whole_number(said, key) for key, axis in NETWORK.items() if key in said}
    if spans and math.prod(spans.values()) != topology.slices:
        listed = ", ".join(f"{key}={said[key]}" for key in NETWORK if key in said)
        product = math.prod(spans.values())
        raise IncompleteError(f"{listed} make {product} slices, but {topology.name} has {topology.slices}")
    return tuple((axis, count) for axis, count in spans.items() if count > 1)


def stated_topology(group: Mapping[str, Any], assumed: list[str]) -> Topology:
    """Return the slices that a group ran on; choices that the group leaves open are added to `assumed`.

    The shape is the first in the group's `topology` with as many chips as a slice. Without one it is that of the slice
    that a cloud offers. Raises `IncompleteError` if no such slice is known.
    """
    chip = _chip(group)
    count, slices = _chip_count(group, chip), whole_number(group, "slices", 1)
    if count % slices:
        raise IncompleteError(f"{count} chips do not make {slices} slices")
    if chip.traits.described:
        return gpu_topology(chip.name, count)
    text, each = str(group.get("topology", "")), count // slices
    shapes = [s for s in re.findall(r"\b\d+(?:x\d+)+\b", text) if math.prod(map(int, s.split("x"))) == each]
    if not shapes:
        shapes = [slice_shape(chip, each) or str(each)]
        assumed.append(f"topology {shapes[0]}")
    topology = made_of(chip, shapes[0], slices)
    if topology.num_chips != count:
        raise IncompleteError(f"{count} chips are stated, but {topology.name} has {topology.num_chips}")
    return topology


def _chip_count(group: Mapping[str, Any], chip: Chip) -> int:
    """Return the number of chips of all slices, stated as such, or by the number of JAX devices.

    Raises `IncompleteError` for any other text, such as a range, and if both are stated and differ.
    """
    stated = re.fullmatch(r"(\d+)( ?(chips|gpus|tpus))?( \(.*\))?", str(group.get("chips", "")).strip().lower())
    devices = whole_number(group, "devices") if "devices" in group else 0
    if stated is None and (not devices or "chips" in group):
        raise IncompleteError(f"the number of chips is not stated ({group.get('chips')})")
    count = int(stated[1]) if stated else devices // chip.devices_per_chip
    if count < 1 or (devices and devices not in (count, count * chip.devices_per_chip)):
        raise IncompleteError(f"{group.get('chips')} chips are stated, and {devices} devices")
    return count


def _chip(group: Mapping[str, Any]) -> Chip:
    """Return the chip that the hardware's text names.

    If the text names several, the chip is the first, or the last in a text with the word "likely". Raises
    `IncompleteError` if it names none.
    """
    words = re.findall(r"[a-z]+\d+[a-z]*", str(group["hardware"]).lower())
    known = {alias: name for name in chip_names() for alias in (name, *load_chip(name).aliases)}
    chips = [known[word] for word in words if word in known]
    if not chips:
        raise IncompleteError(
            f"the chip of {str(group['hardware'])[:60]!r} is not known ({', '.join(chip_names())} are)"
        )
    return load_chip(chips[-1] if "likely" in str(group["hardware"]) else chips[0])
