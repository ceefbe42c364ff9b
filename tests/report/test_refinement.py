"""A refinement on a terminal: the best first, dropped plans with reasons, and learned figures with their evidence."""

import dataclasses
import re

import pytest
from rich.console import Console

from autoshard.cost import load_calibration
from autoshard.exec import Seen, refine
from autoshard.exec.learn import refinement
from autoshard.report import refinement_report
from tests.exec.learn.refine_checks import MadeUpJudge
from tests.planning import programs


def shown(result) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(refinement_report(result))
    return console.export_text()


def test_the_table_the_ending_and_the_figures(monkeypatch: pytest.MonkeyPatch):
    judge = MadeUpJudge(lambda bill: 4 * bill.seconds(load_calibration("cpu")))
    every = judge.judge

    def fails_on_one(program, plans, progress):
        for number, (name, seen) in enumerate(every(program, plans, progress)):
            yield name, Seen(failed="it exploded") if number == 1 else seen

    judge.judge = fails_on_one
    monkeypatch.setattr(refinement, "judge_of", lambda *_: judge)
    result = refine(programs.program("mlp"), topology="cpu:8", mesh="data=4,model=2", plans=3, rounds=1)
    text = shown(result)
    assert re.match(r"Measured .* a step; predicted were .* before, .* after learning: ", text.splitlines()[1])
    assert result.best.seen.seconds is not None
    near = abs(result.best.predicted_after_s / result.best.seen.seconds - 1) <= 0.1
    assert ("learning: explained." in text) == near and ("is not explained by what was learned" in text) == (not near)
    names = {each.name.split()[0] for each in result.judged}
    rows = [line for line in text.splitlines() if line.split(" ")[0] in names]
    assert rows[0].startswith(result.best.name)
    assert f"{result.judged[-1].name}: dropped, it exploded" in text
    assert "*: intermediates chosen by autoshard" in text, "explains the names of baselines"
    assert "Planned 1 time: " in text and result.why in text
    assert "Learned from 2 observations: median error of the time 300%, now " in text
    assert not result.stored and "stored" not in text
    result = dataclasses.replace(result, stored="/data/observations.sqlite3")
    text = shown(result)
    assert f"Observations are stored in {result.stored}." in " ".join(text.split())
    assert "Later plans of cpu:8 are priced with these figures; --no-calibration ignores them." in text
    for each in result.fit.figures:
        assert each.figure in text
