"""Options, stages and chips that a measured group states in words."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.cost import CLOCK, HIGHEST_STATE, Chip, Topology, chip_names, load_chip
from autoshard.errors import UserError
from autoshard.program import GroupedTiles, Pipeline, read_pipeline
from autoshard.validation.pair_dims import whole_number
from autoshard.validation.published_runs import IncompleteError, Run, made_of, slice_shape


OPTIONS: dict[str, Callable[[Run, Any], Run]] = {}
"""What a plan may say beside its mesh, and how it changes the run."""

METHODS = {"all-gather": "gather", "ulysses": "heads", "ring": "ring"}
"""Context parallelism by MaxText's names -> the exchange."""


def _context_method(run: Run, value: Any) -> Run:
    if value not in METHODS:
        raise IncompleteError(f"cp_method={value} is not rebuilt; {', '.join(METHODS)} are")
    return dataclasses.replace(run, exchange=METHODS[value]) if run.context > 1 else run


def _balanced(run: Run, value: Any) -> Run:
    if not isinstance(value, bool):
        raise IncompleteError(f"load_balanced={value} is neither true nor false")
    return dataclasses.replace(run, balanced=value)


def _head(run: Run, value: Any) -> Run:
    """The dim of the head's weights that FSDP splits: the width that it contracts, or the vocabulary."""
    if "vocab" in str(value):
        return run
    if "embed" in str(value):
        return dataclasses.replace(run, head_on_width=True)
    raise IncompleteError(f"lm_head={value} is not rebuilt")


def _scan_axis(run: Run, value: Any) -> Run:
    """The dim of stacked parameters that counts layers, as MaxText calls it."""
    if value not in (0, 1):
        raise IncompleteError(f"param_scan_axis={value} is not rebuilt; 0 and 1 are")
    return dataclasses.replace(run, stack_axis=int(value))


def _scanned(run: Run, value: Any) -> Run:
    if not isinstance(value, bool):
        raise IncompleteError(f"scan_layers={value} is neither true nor false")
    return dataclasses.replace(run, scanned=value)


def _routing(run: Run, value: Any) -> Run:
    """Dropping by its slots; dropless kernels with balanced experts, by their tiles (MaxText's where none are named).

    Other kernels than megablox and tokamax's tiled ones are not known.
    """
    text = str(value)
    slots = re.search(r"dropping.*?cf ([\d.]+)", text)
    if slots is not None:
        return dataclasses.replace(run, capacity=float(slots[1]))
    named = re.search(r"tile \(?(\d+)[,/] ?(\d+)[,/] ?(\d+)", text)
    if named is None and re.search(r"tile|gmm", text) and "default tile" not in text:
        raise IncompleteError(f"moe={value}: tiles of kernels are not rebuilt")
    if named is not None or run.decoder.experts == 1 or "dropless" in text or "megablox" in text:
        assumed = (*run.assumed, "experts that share the tokens evenly")
        tiles = GroupedTiles() if named is None else GroupedTiles(*map(int, named.groups()))
        return dataclasses.replace(run, tiles=tiles, assumed=assumed)
    raise IncompleteError(f"moe={value} is not rebuilt")


def _tiles(run: Run, value: Any) -> Run:
    """One triple for all kernels."""
    named = re.fullmatch(r"(\d+)/(\d+)/(\d+)( x 6 paths)?", str(value))
    if named is None:
        raise IncompleteError(f"moe_tiles={value} is not rebuilt")
    return dataclasses.replace(run, tiles=GroupedTiles(*map(int, named.groups()[:3])))


def _inner_tile(run: Run, value: Any) -> Run:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise IncompleteError(f"moe_tile_mlp={value} is not a whole number above 0")
    return dataclasses.replace(run, tiles=dataclasses.replace(run.tiles or GroupedTiles(), inner=value))


def _microbatches(run: Run, value: Any) -> Run:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or run.batch % value:
        raise IncompleteError(f"gradient_accumulation={value} does not divide a batch of {run.batch}")
    return dataclasses.replace(run, accumulation=value)


def _gathered(run: Run, value: Any) -> Run:
    if not isinstance(value, bool):
        raise IncompleteError(f"keep_gathered_weights={value} is neither true nor false")
    return dataclasses.replace(run, keeps_gathered=value)


def _spread_state(run: Run, value: Any) -> Run:
    if not isinstance(value, bool):
        raise IncompleteError(f"zero1={value} is neither true nor false")
    if value and (run.copies == 1 or run.spread * run.tensor * run.experts > 1):
        raise IncompleteError("zero1 beside other degrees than data parallelism is not rebuilt")
    return dataclasses.replace(run, spreads_state=value)


def _summed_late(run: Run, value: Any) -> Run:
    if not isinstance(value, bool):
        raise IncompleteError(f"deferred_grad_allreduce={value} is neither true nor false")
    if value and (run.copies == 1 or run.spread * run.tensor * run.experts > 1):
        raise IncompleteError("deferred_grad_allreduce beside other degrees than data parallelism is not rebuilt")
    if value and run.batch // run.accumulation % run.copies:
        raise IncompleteError(f"a microbatch of {run.batch // run.accumulation} does not divide by dp={run.copies}")
    return dataclasses.replace(run, sums_late=value)


def _clock(run: Run, value: Any) -> Run:
    """The state of a TPU's clock, as the compiler's flag says it."""
    if not isinstance(value, int) or not 0 <= value <= HIGHEST_STATE:
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
OPTIONS["moe_tiles"] = _tiles  # after the kernels
OPTIONS["moe_tile_mlp"] = _inner_tile  # of which it changes one dim
OPTIONS["param_scan_axis"] = _scan_axis
OPTIONS["scan_layers"] = _scanned
OPTIONS["deferred_grad_allreduce"] = _summed_late  # after the number of microbatches, which it divides


MICROBATCHES = ("num_pipeline_microbatches", "microbatches")
ROUNDS = "num_pipeline_repeats"
LAYERS = "num_layers_per_pipeline_stage"
SCHEDULE = "schedule"
NETWORK = {"dcn_dp": "data", "dcn_pp": "stage", "dcn_fsdp": "fsdp"}
"""How many slices a degree spans -> its axis."""
STAGED = frozenset({*MICROBATCHES, ROUNDS, LAYERS, SCHEDULE, *NETWORK})
"""Keys of a plan that are read here."""


def staged(run: Run, said: Mapping[str, Any], stages: int) -> Run:
    """The run with its layers in so many stages, and with what lies between slices.

    There are as many microbatches as stages if nothing is said. In MaxText a microbatch goes round as often as there
    are chunks of `num_layers_per_pipeline_stage` layers for (of one layer, if not even rounds are stated); where no
    framework is named and neither is stated, it goes through the stages once. Raises `IncompleteError` for what cannot
    be.
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
    part = run.batch // run.accumulation
    if part % pipeline.microbatches:
        raise IncompleteError(f"{pipeline.microbatches} microbatches do not divide {part} sequences")
    return dataclasses.replace(run, pipeline=pipeline, assumed=(*run.assumed, *_assumed(pipeline, layers)))


def _schedule(said: Mapping[str, Any], stages: int, layers: int) -> str:
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
    found = []
    if pipeline.outside(layers):
        found.append(f"{pipeline.outside(layers)} of {layers} layers before the stages")
    if pipeline.rounds(layers) > 1:
        found.append("weights of all rounds brought to their stages once a step")
    return found


def _network(said: Mapping[str, Any], topology: Topology) -> tuple[tuple[str, int], ...]:
    """How many slices each axis spans; nothing where no row says so: then the first axes do."""
    spans = {axis: whole_number(said, key) for key, axis in NETWORK.items() if key in said}
    if spans and math.prod(spans.values()) != topology.slices:
        listed = ", ".join(f"{key}={said[key]}" for key in NETWORK if key in said)
        made = math.prod(spans.values())
        raise IncompleteError(f"{listed} make {made} slices, but {topology.name} has {topology.slices}")
    return tuple((axis, count) for axis, count in spans.items() if count > 1)


def stated_topology(group: Mapping[str, Any], assumed: list[str]) -> Topology:
    """The slice that a group ran on, or its `slices`; what it leaves open is filled in, and said in `assumed`.

    Raises `IncompleteError` where no such slice is known.
    """
    chip = _chip(group)
    if not str(group["chips"]).isdigit():
        raise IncompleteError(f"the number of chips is not stated ({group['chips']})")
    count, slices = int(group["chips"]), whole_number(group, "slices", 1)
    if count % slices:
        raise IncompleteError(f"{count} chips do not make {slices} slices")
    text, each = str(group.get("topology", "")), count // slices
    shapes = [s for s in re.findall(r"\b\d+(?:x\d+)+\b", text) if math.prod(map(int, s.split("x"))) == each]
    if not shapes:
        shapes = [slice_shape(chip, each) or str(each)]
        assumed.append(f"topology {shapes[0]}")
    found = made_of(chip, shapes[0], slices)
    if found.num_chips != count:
        raise IncompleteError(f"{count} chips are stated, but {found.name} has {found.num_chips}")
    return found


def _chip(group: Mapping[str, Any]) -> Chip:
    """The chip that the hardware's text names; the one called likely where it names two."""
    words = re.findall(r"[a-z]+\d+[a-z]*", str(group["hardware"]).lower())
    known = {alias: name for name in chip_names() for alias in (name, *load_chip(name).aliases)}
    found = [known[word] for word in words if word in known]
    if not found:
        raise IncompleteError(
            f"the chip of {str(group['hardware'])[:60]!r} is not known ({', '.join(chip_names())} are)"
        )
    return load_chip(found[-1] if "likely" in str(group["hardware"]) else found[0])
