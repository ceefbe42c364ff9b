"""The Hugging Face Trainer under auto-sharding: it trains, evaluates, saves, and resumes under another plan."""

from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.exec.devices.torch_names import own_name
from tests.exec.torch_xla_hook.torch_xla_processes import run_checks
from tests.exec.torch_xla_hook.torch_xla_trainer_checks import SAVED, STEPS


FIRST, SECOND = "2,4", "4,2"
TRAINED = [str(step) for step in range(1, STEPS + 1)]
EVALUATED = [str(SAVED), str(STEPS)]


def run(name: str, folder: Path, **environment: str) -> dict[str, Any]:
    environment |= {"FOLDER": str(folder), "HF_HUB_OFFLINE": "1", "AUTOSHARD_STRICT": "1"}
    return run_checks("torch_xla_trainer_checks", name, **environment)[name]


def check_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found["losses"]) == TRAINED and list(found["evaluated"]) == EVALUATED
    for kind in ("losses", "evaluated"):
        assert found[kind] == pytest.approx(expected[kind], rel=1e-5)


def alone(family: str, folder: Path) -> dict[str, Any]:
    """Train on one device, without a plan."""
    return run(f"alone_{family}", folder / "alone", CPU_NUM_DEVICES="1")


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_plain_trainer_goes_on_under_another_plan(family: str, tmp_path: Path):
    expected = alone(family, tmp_path)
    first = run(f"planned_{family}", tmp_path, XLA_AUTO_SPMD_MESH=FIRST)
    second = run(f"resumed_{family}", tmp_path, XLA_AUTO_SPMD_MESH=SECOND)
    assert first["mesh"] == {"data": 2, "model": 4} and second["mesh"] == {"data": 4, "model": 2}
    for found in (first, second):
        check_alike(found, expected)
        assert found["plans"] == 2, "one of training, one of evaluation"
        assert any(text.startswith("{devices=") for text in found["held"])
    assert first["held"] != second["held"]


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])  # the Trainer cannot shard GPT-2's output
def test_the_trainer_with_fsdpv2_goes_on_without(family: str, tmp_path: Path):
    expected = alone(family, tmp_path)
    wrapped = run(f"wrapped_{family}", tmp_path, XLA_AUTO_SPMD_MESH="fsdp=8,tensor=1")
    check_alike(wrapped, expected)
    assert wrapped["wrapped"] == "SpmdFullyShardedDataParallel" and wrapped["mesh"] == {"fsdp": 8, "tensor": 1}
    assert wrapped["plans"] == 2 and all(text.startswith("{devices=") for text in wrapped["held"])
    assert not any("_orig_module" in name for name in wrapped["parameters"])
    # The Trainer saves the wrapped module, in which no parameter has these names.
    saved = tmp_path / f"checkpoint-{SAVED}" / "pytorch_model.bin"
    state = torch.load(saved, weights_only=True)
    assert all("_orig_module" in name for name in state)
    torch.save({own_name(name): value for name, value in state.items()}, saved)
    check_alike(run(f"resumed_{family}", tmp_path, XLA_AUTO_SPMD_MESH=SECOND), expected)
