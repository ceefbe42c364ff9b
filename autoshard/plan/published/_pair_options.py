"""What a measured plan says beside its mesh and its sizes, and what that changes of the run."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from autoshard.cost import CLOCK, HIGHEST_STATE
from autoshard.plan.published._published import IncompleteError, Run
from autoshard.program import GroupedTiles


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
