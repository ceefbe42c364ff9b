"""The table of a sweep: readable at 80 columns, with the extremes marked."""

import io

from rich.console import Console

from autoshard.planning import SweepRow
from autoshard.report import sweep_figures, sweep_report


GIB = 1 << 30


def row(topology: str, chips: int, step: float, remat: str = "full,keep=q_proj/k_proj/v_proj", **more) -> SweepRow:
    plain = {"mesh": "data=256,model=4", "mfu": 0.456, "peak_bytes": 10 * GIB, "memory_limit_bytes": 12 * GIB}
    chosen = {"recipe": {"batch": 1024, "remat": "full,keep=q_proj/k_proj/v_proj", "microbatches": 2}}
    plain |= {"tokens": 8_388_608, **chosen, **more}
    return SweepRow(topology, 1024, remat, step_time_s=step, chips=chips, **plain)


ROWS = [
    row("v5p:8x8x16", 1024, 12.9),
    row("v6e:16x16*4", 1024, 14.2, mesh="data=512,model(2 of 4)=2,model(2 of 4)'=2"),
    row("v5e:16x16", 256, 88.0),
    SweepRow("v5e:4x4", None, None, failed="it does not fit: parameters, state and batch alone are 987 GiB."),
]
PRICES = {"v5p": 4.2, "v6e": 2.7, "v5e": 1.2}


def shown(rows: list[SweepRow] = ROWS, width: int = 80, **more) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(sweep_report(rows, more.pop("prices", PRICES), **more))
    return stream.getvalue().splitlines()


def test_the_table_is_readable_at_80_columns():
    lines = shown(tokens=15e12)
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["topology", "batch", "step", "tok/s", "/chip", "MFU", "days", "cost", "left"]
    assert lines[2].split()[:2] == ["f", "v5p:8x8x16"]
    text = " ".join(" ".join(lines).split())
    days = 15e12 * 12.9 / 8_388_608 / 86_400
    assert f" {days:.3g} " in text and "no plan" in text
    assert "- v5e:4x4: it does not fit: parameters, state and batch alone are 987 GiB." in text
    assert "microbatches 2" in text and "full,keep=q_proj" in text
    assert not any("…" in line for line in lines)


def test_policies_that_differ_stand_among_the_figures():
    rows = [
        row("v6e:16x16*4", 1024, 114.2, remat=remat, recipe={}, mfu=1 / 3, memory_limit_bytes=110 * GIB)
        for remat in ("full", "dots", "none")
    ]
    lines = shown(rows, tokens=15e12)
    assert lines[0].split()[1:3] == ["batch", "remat"] and lines[3].split()[1:3] == ["1024", "dots"]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    same = shown(rows[:1] * 2, tokens=15e12)
    assert "remat" not in same[0] and "full" in same[-1]


def test_marks_are_explained():
    lines = shown(tokens=15e12)
    marks = {line.split()[1]: line.split()[0] for line in lines[2:5]}
    assert marks == {"v5p:8x8x16": "f", "v6e:16x16*4": "f", "v5e:16x16": "*sf"}
    assert any("* cheapest for each token; f: none is both faster and cheaper" in line for line in lines)
    some = " ".join(" ".join(shown(prices={"v5p": 4.2})).split())
    assert "* fastest; f: none is both faster and of fewer chips; s: the fewest chips that fit;" in some
    assert "No price is given of v5e, v6e" in some


def test_figures_say_the_same_as_the_table():
    figures = sweep_figures(ROWS, PRICES, 15e12)
    best = figures["rows"][figures["best"]]
    assert best["cost"] == min(each["cost"] for each in figures["rows"] if each["cost"] is not None)
    assert figures["smallest"] == 2
    assert figures["frontier"] == sorted(figures["frontier"], key=lambda n: ROWS[n].step_time_s)
    assert figures["rows"][3]["cost"] is None and figures["rows"][3]["failed"]
    assert sweep_figures(ROWS[3:], PRICES)["best"] is None
