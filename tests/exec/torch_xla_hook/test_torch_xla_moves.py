"""`XLA_AUTO_USE_GROUP_SHARDING`: a graph's inputs are split in a group, or one at a time."""

from types import SimpleNamespace
from typing import Any

import pytest

from autoshard import UserError
from tests.exec.torch_xla_hook.torch_xla_processes import run_checks


pytest.importorskip("torch")
from autoshard.exec.torch_xla_hook.pins import input_placement  # noqa: E402


SETTINGS = ("", "1", "0")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return the results of one process for each setting."""

    def moves(setting: str) -> Any:
        here = {"XLA_AUTO_SPMD_MESH": "4,2", "AUTOSHARD_STRICT": "1", "XLA_AUTO_USE_GROUP_SHARDING": setting}
        return run_checks("torch_xla_inner_checks", "auto", "moves", **here)["moves"]

    return {setting: moves(setting) for setting in SETTINGS}


@pytest.mark.full
def test_a_group_is_split_by_the_step_itself_and_nothing_passes_through_the_host(found: dict[str, Any]):
    grouped, single = found["1"], found["0"]
    assert grouped["fetched"] == [0, 0]
    assert single["fetched"] == single["inputs_split"] == grouped["inputs_split"]
    assert min(single["fetched"]) > 0


@pytest.mark.full
def test_what_fits_is_a_group_where_nothing_is_reported(found: dict[str, Any]):
    assert found[""] == found["1"]


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_and_values_are_right_either_way(found: dict[str, Any], setting: str):
    here = found[setting]
    assert here["loss_difference"] < 1e-5 and here["parameter_difference"] < 1e-5 and here["read"] < 1e-5
    assert here["compiles"] == [1, 2, 2, 2]
    assert here["read_compiles"] == found["0"]["read_compiles"]


@pytest.mark.full
def test_tensors_are_split_alike_either_way(found: dict[str, Any]):
    for kind in ("parameters", "states", "inputs", "read_parameters"):
        assert found["1"][kind] == found["0"][kind]
    assert any(text.startswith("{devices=") for text in found["1"]["parameters"])


def test_the_group_is_asked_for_in_words_that_are_known(monkeypatch: pytest.MonkeyPatch):
    for text, answer in {"": None, "1": True, "TRUE": True, "0": False, "false": False}.items():
        monkeypatch.setenv(input_placement.GROUP_VARIABLE, text)
        assert input_placement.group_here() is answer
    monkeypatch.setenv(input_placement.GROUP_VARIABLE, "maybe")
    with pytest.raises(UserError, match="XLA_AUTO_USE_GROUP_SHARDING=maybe is no answer: set 1"):
        input_placement.group_here()


def test_whole_inputs_have_to_fit_with_the_step():
    value: Any = SimpleNamespace(numel=lambda: 10, element_size=lambda: 4)
    taken: Any = SimpleNamespace(inputs=(value, value, value))

    def decision(limit: int) -> Any:
        plan = SimpleNamespace(prediction=SimpleNamespace(peak_bytes=100), memory_limit_bytes=limit)
        return SimpleNamespace(specs=("split", None, "split"), plan=plan)

    assert input_placement.fits_whole(taken, decision(180))
    assert not input_placement.fits_whole(taken, decision(179))
