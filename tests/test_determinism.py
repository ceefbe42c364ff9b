"""Equal input gives equal bytes: for any hash seed, number of cores, load, directory and name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard import cli
from tests.faults import STEP


ROOT = Path(__file__).parents[1]
ONE_CORE = """
import os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from autoshard.cli import main
raise SystemExit(main())
"""
BUSY = "while True: pass"


@pytest.mark.parametrize("topology", ["cpu:8", pytest.param("v5e:2x4", marks=pytest.mark.full)])
def test_plans_do_not_depend_on_where_they_are_made(topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (project := tmp_path / "project").mkdir()
    (project / "step.py").write_text(STEP)
    monkeypatch.chdir(project)
    options = ["--topology", topology, "--quiet", "--no-cache", "--candidates", "2"]
    assert cli.main(["plan", "./step.py", *options, "--out", "plan.json", "--save-problem", "problem.json"]) == 0
    first = {path.name: path.read_bytes() for path in project.glob("*.json")}
    assert len(first) > 2, "the plan, its problem and another candidate"
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT), "TZ": "Asia/Kathmandu"}
    (elsewhere := tmp_path / "elsewhere").mkdir()
    said = [str(project / "step.py"), *options, "--out", "../project/plan.json", "--save-problem", "problem.json"]
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        command = [sys.executable, "-c", ONE_CORE, "plan", *said]
        subprocess.run(command, check=True, cwd=elsewhere, env=environment, stdout=subprocess.DEVNULL)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    (elsewhere / "problem.json").replace(project / "problem.json")
    assert {path.name: path.read_bytes() for path in project.glob("*.json")} == first
