"""The examples run as a user runs them, agree with their frameworks, and fail where they do not agree."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.compiling import QUICKLY


FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
LIKE_OTHERS = ("equinox_model.py", "flax_nnx.py", "hf_finetune.py", "pipeline.py")
LIKE_OTHERS += ("torch_module.py", "torch_xla_script.py")
"""Examples left to `make test-full`: pages of the docs and other tests run such models and scripts as well."""


def run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, without the devices that tests have.

    A new interpreter runs the script of PyTorch/XLA, whose imports install the hook.
    """
    env = os.environ | {"XLA_FLAGS": QUICKLY}
    if script.name == "torch_xla_script.py":
        return subprocess.run([sys.executable, str(script)], cwd=folder, env=env, capture_output=True, text=True)
    return forked.run([str(script)], folder, env)


def losses(kind: str, out: str) -> list[float]:
    """Return the losses that a script prints."""
    (line,) = re.findall(rf"^{kind} losses: +(.*)$", out, re.MULTILINE)
    return [float(word) for word in line.split()]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LIKE_OTHERS)) for name in EXAMPLES]
)
def test_an_example_trains_as_its_framework_does(name: str, tmp_path: Path):
    done = run(FOLDER / name, tmp_path)
    assert done.returncode == 0, done.stderr
    planned = losses("planned", done.stdout)
    assert len(planned) >= 3 and planned[-1] < planned[0]
    assert planned == pytest.approx(losses("plain", done.stdout), rel=1e-3)
    assert done.stdout.splitlines()[-1].startswith("AGREES with ")
    assert re.search(r"^[a-z][a-z ]* over .*\bdata\b", done.stdout, re.MULTILINE), "the plan splits something"
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_an_example_whose_kernel_is_wrong_fails(tmp_path: Path):
    right = (FOLDER / "pallas_kernel.py").read_text(encoding="utf-8")
    wrong = right.replace("out_ref[...] = attend(", "out_ref[...] = 1.01 * attend(")
    assert wrong != right
    (tmp_path / "wrong.py").write_text(wrong, encoding="utf-8")
    done = run(tmp_path / "wrong.py", tmp_path)
    assert done.returncode == 1 and "AssertionError" in done.stderr and "AGREES" not in done.stdout


def test_every_example_is_in_the_table_and_one_page_long():
    rows = re.findall(r"^\| \[`(\w+\.py)`\]\((\w+\.py)\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(first for first, _ in rows) == EXAMPLES and all(first == second for first, second in rows)
    for name in EXAMPLES:
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= 110
