import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from random_problems import make_problem
from test_search import hard_problem

from autoshard.errors import UserError
from autoshard.solver import evaluate, write_contest
from autoshard.solver.solve_command import run_solve


ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def signals_as_before():
    """Restore the signal handlers: the command sets its own, and the test run needs the old ones."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def young(monkeypatch):
    """Fixture that restarts the process's clock: otherwise the limit would count from the start of pytest."""
    monkeypatch.setattr("autoshard.solver.solve_command._age", lambda: 0.0)


def test_the_last_line_is_the_choices(tmp_path, capsys, young):
    problem = make_problem([[3, 2], [0, 2]], [(0, 1, [0, 0, 9, 0])])
    write_contest(problem, tmp_path / "p.json.gz")
    out = tmp_path / "answer.json"
    assert run_solve(str(tmp_path / "p.json.gz"), 10.0, out=str(out)) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "[0, 0]"
    assert "the choices are proven optimal" in printed.err
    assert re.search(r"\d s  incumbent 3  bound 3  gap 0\.0000 %", printed.err)
    assert json.loads(out.read_text()) == {"choices": [0, 0], "cost": 3, "lower_bound": 3, "status": "optimal"}


def test_no_feasible_choices(tmp_path, capsys, young):
    problem = make_problem([[0, 5]], [], [(0, 2, 4, [10, 6])], 4)
    write_contest(problem, tmp_path / "p.json")
    assert run_solve(str(tmp_path / "p.json"), 10.0) == 1
    printed = capsys.readouterr()
    assert "the smallest excess found is 2 bytes, at time 2" in printed.err
    assert printed.out.splitlines()[-1] == "[1]"


def test_a_limit_of_nothing():
    with pytest.raises(UserError, match=r"the time limit is 0 s; it must be more than 0"):
        run_solve("none.json", 0.0)


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_the_best_so_far(tmp_path, number):
    problem = hard_problem(300, 9, hops=(1, 2))
    write_contest(problem, tmp_path / "p.json")
    code = (
        "import sys; from autoshard.solver import solve_command, solve_problem; solve_problem._SMALL = -1; "
        f"sys.exit(solve_command.run_solve({str(tmp_path / 'p.json')!r}, 600.0))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if re.search(r"incumbent \d", line):
            break
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert evaluate(problem, json.loads(printed.splitlines()[-1])).feasible
