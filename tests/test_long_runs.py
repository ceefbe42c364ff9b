"""Resources of a process do not grow with its plans; `make bench` makes 300, and 2,000 steps under the hook."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]


def held(kind: str, count: int, folder: Path) -> list[dict[str, int]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "CPU_NUM_DEVICES": "8"}
    if kind == "steps":
        environment |= {"XLA_AUTO_SPMD_MESH": "4,2", "XLA_FLAGS": ""}
    command = [sys.executable, "-W", "ignore", "-m", "tests.long_runs", kind, str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("kind", "count"), [("plans", 12), pytest.param("steps", 48, marks=pytest.mark.full)])
def test_nothing_is_left_of_what_is_done(kind: str, count: int, tmp_path: Path):
    samples = held(kind, count, tmp_path)
    assert [sample["number"] for sample in samples] == list(range(count // 12, count + 1, count // 12))
    # One-time resources, such as threads of libraries, exist once every topology has been planned.
    for what in ("descriptors", "threads", "files", "children"):
        assert len({sample[what] for sample in samples[6:]}) == 1, what
    assert samples[-1]["files"] == 1, "the plan that was saved, or what torch_xla keeps while it runs"
