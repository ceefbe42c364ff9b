"""A sweep as one self-contained HTML page: cost against time, with prices and tokens that can be changed on it."""

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.plan import SweepRow
from autoshard.report._html import environment, script_json


TOKENS = 1e12
"""Tokens of a run, where nobody says how many; the page can change it."""


def sweep_page(
    rows: Sequence[SweepRow],
    prices: Mapping[str, float],
    tokens: float | None = None,
    pages: Mapping[str, str] | None = None,
) -> str:
    """The page, as text. `prices` (of a chip's hour, by chip) and `tokens` are what its fields begin with.

    `pages` has the pages of plans, as paths seen from this one, by the names of their files (`SweepRow.plan`).
    """
    planned = [row for row in rows if not row.failed]
    chips = list(dict.fromkeys(row.chip for row in planned))
    data = {
        "chips": {chip: prices.get(chip) for chip in chips},
        "tokens": tokens or TOKENS,
        "rows": [_row(row) | {"page": (pages or {}).get(row.plan)} for row in planned],
    }
    return (
        environment()
        .get_template("sweep.html")
        .render(
            data=script_json(data),
            chips=chips,
            planned=len(planned),
            failed=[row for row in rows if row.failed],
        )
    )


def _row(row: SweepRow) -> dict[str, Any]:
    return {
        "topology": row.topology,
        "chip": row.chip,
        "chips": row.chips,
        "batch": row.batch,
        "remat": row.remat,
        "mesh": row.mesh,
        "recipe": ", ".join(f"{name} {value}" for name, value in row.recipe.items() if value is not None),
        "step": row.step_time_s,
        "tokens": row.tokens,
        "mfu": row.mfu,
        "left": row.headroom_bytes,
        "plan": row.plan,
    }
