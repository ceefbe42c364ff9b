"""torch_xla's wheel installs its own torchax over the installed one: both lower models to the same programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli import main


OTHER = Path(sys.prefix) / "other" / "site-packages"
LINE = "plan hf:{} --train --batch 8 --topology cpu:4@2 --mesh data=2,model=2 --quiet --out {}"
CODE = """
import sys
import torchax
from autoshard.cli import main
assert torchax.__file__.startswith(sys.argv[1]), torchax.__file__
for line in sys.argv[2:]:
    assert main(line.split()) == 0
"""


@pytest.mark.skipif(not OTHER.exists(), reason="`make test` installs it")
@pytest.mark.full
@pytest.mark.parametrize("models", [["gpt2-tiny"], ["mixtral-tiny", "vit-tiny"]])
def test_plans_are_the_same_with_either_torchax(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "cache"))  # the result cached here counts for neither
    env = os.environ | {"PYTHONPATH": f"{OTHER}{os.pathsep}{Path(__file__).parents[2]}"}
    other = tmp_path / "other"
    other.mkdir()
    command = [sys.executable, "-c", CODE, str(OTHER), *(LINE.format(model, model) for model in models)]
    done = subprocess.run(command, cwd=other, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for model in models:
        assert main(LINE.format(model, model).split()) == 0
        assert (other / model).read_text() == Path(model).read_text(), model
