"""Models that fit only if they are split: they train although no plan was made before."""

from typing import Any

import pytest

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.lifecycle.abstract_first_step import _loss
from tests.exec.torch_xla_hook.torch_xla_processes import run_checks


LIMIT = "0.35"
"""GiB of a device; the parameters take 0.29."""


def ahead(name: str, **environment: str) -> dict[str, Any]:
    here = {"XLA_AUTO_SPMD_MESH": "4,2", "AUTOSHARD_STRICT": "1", "AUTOSHARD_MEMORY_LIMIT": LIMIT} | environment
    return run_checks("torch_xla_ahead_checks", name, **here)[name]


def check_trained(row: dict[str, Any]) -> None:
    assert row["loss"] < 1e-5 and row["parameters"] < 1e-4
    assert row["split"] > 0.9 and row["plans"] == 1


def test_no_device_holds_what_is_split_whole():
    row = ahead("on_the_host")
    check_trained(row)
    assert not row["said"]
    # Eight devices with whole parameters need eight times their size.
    assert row["growth"][0] < 7


@pytest.mark.full
def test_without_a_plan_ahead_each_device_holds_everything():
    row = ahead("on_the_host", XLA_AUTO_PLAN_AHEAD="0")
    check_trained(row)
    assert row["growth"][0] > 8


@pytest.mark.full
def test_a_module_on_the_meta_device_is_made_at_its_first_call():
    row = ahead("on_meta")
    check_trained(row)
    assert row["growth"][0] < 7


@pytest.mark.full
def test_what_cannot_be_planned_ahead_is_split_evenly():
    row = ahead("not_copied", AUTOSHARD_STRICT="0")
    check_trained(row)
    assert row["growth"][0] < 7
    assert row["said"] == [
        "autoshard: Net is split evenly before its first step, which could not be planned with nothing on the devices: "
        "RuntimeError: who is this"
    ]


def test_a_step_without_a_value_to_differentiate_names_the_cause():
    torch = pytest.importorskip("torch")
    with pytest.raises(UserError, match="no loss and no tensor that can be differentiated"):
        _loss({"ids": torch.arange(4), "values": torch.ones(4)})
    assert _loss((torch.arange(4), torch.full((4,), 3.0, requires_grad=True))).item() == 9
