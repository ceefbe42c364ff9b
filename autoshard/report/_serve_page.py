"""Ways to serve as one self-contained HTML page: throughput against latency, with limits and prices that can be
changed on it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.base.reading import read_json
from autoshard.errors import UserError
from autoshard.report._html import environment, script_json


_COUNTS = ("tensor", "attention", "experts", "engines", "prompt_engines", "batch", "chunk")
_COUNTS += ("prompt_tensor", "prompt_attention", "prompt_experts")
_AMOUNTS = ("first_s", "token_s", "gap_s", "tokens_per_s", "peak_bytes", "prompt_s", "decode_s")
_PARTS = ("added_s", "sent_s")
"""They may be zero."""
_AGAIN = "make it again with `autoshard serve-plan ... --json`"


def read_serving(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What `autoshard serve-plan --json` printed into a file; None for a file of anything else.

    Raises `UserError` for one that was, and is damaged or of an older version.
    """
    if Path(path).is_dir():
        return None
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or not {"model", "frontier", "points", "topology"} <= set(value):
        return None
    for name, kind in (("model", str), ("topology", str), ("chip", str), ("chips", int), ("points", list)):
        if not isinstance(value.get(name), kind):
            raise UserError(f"{path} has no `{name}` of the right type; {_AGAIN}.")
    for number, point in enumerate(value["points"]):
        if not isinstance(point, dict) or not _is_point(point):
            raise UserError(f"`points.{number}` in {path} is no way to serve; {_AGAIN}.")
    for name in ("input", "output", "first_limit_s", "token_limit_s", "gap_limit_s"):
        if not _is_amount(value.get(name)) and not (value.get(name) is None and name.endswith("_s")):
            raise UserError(f"`{name}` in {path} is no number; {_AGAIN}.")
    if not value["points"] or value["chips"] < 1:
        raise UserError(f"{path} holds no way to serve; {_AGAIN}.")
    return value


def _is_point(point: Mapping[str, Any]) -> bool:
    commands = point.get("commands")
    return (
        all(isinstance(point.get(name), int) and _is_amount(point[name]) for name in _COUNTS)
        and all(_is_amount(point.get(name)) and (point[name] > 0) for name in _AMOUNTS)
        and all(_is_amount(point.get(name)) for name in _PARTS)
        and isinstance(commands, list)
        and all(isinstance(each, str) for each in commands)
    )


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e300


def serve_page(figures: Mapping[str, Any], prices: Mapping[str, float]) -> str:
    """The page, as text, of what `serving_figures` gives; `prices` (of a chip's hour, by chip) begin its field."""
    names = (*_COUNTS, *_AMOUNTS, *_PARTS, "commands")
    data = {
        "price": prices.get(figures["chip"]),
        "chips": figures["chips"],
        "output": figures["output"],
        "limits": [figures[f"{name}_limit_s"] for name in ("first", "token", "gap")],
        "points": [{name: point[name] for name in names} for point in figures["points"]],
    }
    return environment().get_template("serve.html").render(figures=figures, data=script_json(data))
