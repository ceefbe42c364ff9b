"""What a measured plan says beside its mesh and its sizes, and what that changes of the run."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from autoshard.plan.published._published import IncompleteError, Run


def _refused(key: str) -> Callable[[Run, Any], Run]:
    def change(run: Run, value: Any) -> Run:
        if value is None or value is False or value in ("none", "no") or (value == 1 and value is not True):
            return run
        raise IncompleteError(f"{key}={value} is not rebuilt")

    return change


OPTIONS: dict[str, Callable[[Run, Any], Run]] = {key: _refused(key) for key in ("zero1", "offload", "cp_method")}
"""What a plan may say beside its mesh, and how it changes the run."""


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


def _routing(run: Run, value: Any) -> Run:
    """Dropless kernels by their matmuls with balanced experts, dropping with its slots; tiles are not priced."""
    slots = re.search(r"dropping.*?cf ([\d.]+)", str(value))
    if slots is not None:
        return dataclasses.replace(run, capacity=float(slots[1]))
    if re.search(r"tile|gmm", str(value)):
        raise IncompleteError(f"moe={value}: tiles of kernels are not rebuilt")
    if run.decoder.experts == 1 or "dropless" in str(value) or "megablox" in str(value):
        return dataclasses.replace(run, assumed=(*run.assumed, "experts that share the tokens evenly"))
    raise IncompleteError(f"moe={value} is not rebuilt")


def _microbatches(run: Run, value: Any) -> Run:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or run.batch % value:
        raise IncompleteError(f"gradient_accumulation={value} does not divide a batch of {run.batch}")
    return dataclasses.replace(run, accumulation=value)


def _gathered(run: Run, value: Any) -> Run:
    if not isinstance(value, bool):
        raise IncompleteError(f"keep_gathered_weights={value} is neither true nor false")
    return dataclasses.replace(run, keeps_gathered=value)


OPTIONS["keep_gathered_weights"] = _gathered
OPTIONS["gradient_accumulation"] = _microbatches
OPTIONS["lm_head"] = _head
OPTIONS["moe"] = _routing
OPTIONS["param_scan_axis"] = _scan_axis
