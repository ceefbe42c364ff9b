"""Modules wrapped by `SpmdFullyShardedDataParallel` under a plan, and the plan that is FSDP only."""

from typing import Any

import pytest

from tests.exec.torch_xla_hook.torch_xla_processes import run_checks


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return checks("transformer", "fsdp_baseline")


def checks(*names: str) -> dict[str, dict[str, Any]]:
    return run_checks("torch_xla_fsdp_checks", *names, AUTOSHARD_STRICT="1", XLA_AUTO_SPMD_MESH="fsdp=8")


def test_a_wrapped_module_is_planned_as_it_is_marked(found: dict[str, Any]):
    check_wrapped(found["transformer"])


@pytest.mark.full
def test_a_module_that_is_wrapped_by_size_is_planned_as_it_is_marked():
    check_wrapped(checks("size")["size"])


def check_wrapped(row: dict[str, Any]) -> None:
    assert row["difference"] < 1e-5
    assert row["compiles"] == [1, 2, 2, 2] and row["plans"] == 1
    assert row["held"] == row["marked"] and all(text.startswith("{devices=") for text in row["held"])
    # Names do not change by wrapping.
    assert sorted(row["planned"]) == sorted(row["names"])
    assert set(row["names"]) <= set(row["kept"])


def test_fsdp_alone_splits_as_fsdpv2_does(found: dict[str, Any]):
    row = found["fsdp_baseline"]
    assert row["planned"] == row["marked"]
    assert len(row["planned"]) == 10 and "_orig_module.0.up.weight" in row["planned"]
