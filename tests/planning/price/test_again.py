"""Equal input gives equal bytes: in another process, after other plans, on a slower machine."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import autoshard
from autoshard.planning import Options, make_plan
from autoshard.planning.record.plan_files import plan_to_json
from autoshard.solver.search import engine as _engine
from tests.planning import programs as made


SCRIPT = """
import sys
from tests.planning import programs as made
folder, *meshes = sys.argv[1:]
for mesh in meshes:
    made.planned("wide mlp", "v5e:4x4", mesh).plan.save(f"{folder}/{mesh}.json")
"""


@pytest.mark.full
def test_two_processes_write_the_same_bytes_after_any_earlier_plans(tmp_path: Path) -> None:
    root = Path(autoshard.__file__).parents[1]
    meshes = ["data=4,model=4", "data=2,model=8"]
    for seed, order in (("1", meshes), ("2", meshes[::-1])):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        (tmp_path / seed).mkdir()
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / seed), *order]
        subprocess.run(command, check=True, env=environment, cwd=root)
    for mesh in meshes:
        first, second = ((tmp_path / seed / f"{mesh}.json").read_bytes() for seed in ("1", "2"))
        assert first == second, mesh


def test_no_wall_time_is_in_the_plan() -> None:
    result = made.planned("mlp")
    assert set(result.wall_s) == {"extract", "price", "solve", "write"}
    text = json.dumps(result.plan.provenance)
    assert not any(str(seconds) in text for seconds in result.wall_s.values())
    assert {"versions", "topology", "seed", "calibration", "bound_s"} <= set(result.plan.provenance)


def test_the_work_of_solving_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # No problem counts as small enough for HiGHS: the search solves all of them.
    monkeypatch.setattr(sys.modules["autoshard.solver.solve_problem"], "_SMALL", 0)
    program = made.program("decoder")
    plans = [make_plan(program, Options(topology="v5e:2x4", mesh="data=2,model=4", time_limit=math.inf)).plan]

    on_the_wall, worked = time.monotonic, _engine.Engine.run
    engines = []

    def searched(engine: _engine.Engine, start: dict[int, int] | None) -> bool:
        engines.append(engine)
        return worked(engine, start)

    # A machine on which everything needs a thousand times as long, because it stalls or is shared.
    monkeypatch.setattr(time, "monotonic", lambda: 1e3 * on_the_wall())
    monkeypatch.setattr(_engine.Engine, "run", searched)
    plans.append(make_plan(program, Options(topology="v5e:2x4", mesh="data=2,model=4")).plan)
    assert engines, "this program is searched"
    assert plan_to_json(plans[0]) == plan_to_json(plans[1])
