"""A slice of the matrix of PyTorch/XLA runs: losses, compilations, and the collectives of the executed HLO."""

from typing import Any

import pytest

from experiments.torch_xla import torch_xla_matrix


MODEL = ["--optimizers", "momentum"]
STEPS = 4


pytestmark = pytest.mark.full
"""Posted and random scripts are compared with eager torch in `make test`."""


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Run a convolutional net, with norms in every step and a spec that changes between a convolution and its bias."""
    plain = torch_xla_matrix.run("cnn", MODEL, STEPS)
    split = torch_xla_matrix.run("cnn", [*MODEL, "--mesh", "4,2"], STEPS)
    return {"plain": plain["momentum"], "split": split["momentum"]}


def test_losses_equal_the_unsharded_run(rows: dict[str, Any]):
    off = torch_xla_matrix.largest_difference(rows["split"]["losses"], rows["plain"]["losses"])
    assert off < torch_xla_matrix.ALLOWED
    assert rows["plain"]["losses"][-1] != rows["plain"]["losses"][0]
    assert rows["split"]["split_parameters"] > 0 and rows["split"]["split_states"] > 0


def test_as_many_compilations_as_unsharded(rows: dict[str, Any]):
    assert rows["split"]["compiles"] == rows["plain"]["compiles"]


def test_every_step_sends_what_is_planned(rows: dict[str, Any]):
    wire = rows["split"]["wire"]
    assert set(wire["planned"]) == {"data", "model"} and len(wire["executed"]) == 2
    for executed in wire["executed"]:
        assert executed == pytest.approx(wire["planned"], rel=0.2)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param("mixtral", "8", marks=pytest.mark.full),
        pytest.param("vit", "4,2", marks=pytest.mark.full),
        pytest.param("gpt2", "8", marks=pytest.mark.full),
    ],
)
def test_what_a_backward_pass_takes_is_sent_as_planned(model: str, mesh: str):
    """Compare the executed bytes of models whose backward passes reshard in different ways.

    - Experts: an outer product's small factors are resharded.
    - Attention: it is split over more axes than the ops around it.
    - Gradients: one product reads a gradient whole, and the next one reads it split.
    - Tables: a table is gathered before a lookup.
    """
    run = torch_xla_matrix.run(model, [*MODEL, "--mesh", mesh], 3)["momentum"]
    assert run["compiles"] == [1, 2, 2]
    for executed in run["wire"]["executed"]:
        assert executed == pytest.approx(run["wire"]["planned"], rel=0.1)


@pytest.mark.full
def test_what_is_planned_is_sent_where_shardy_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    """Set the switch for Shardy: the released binary ignores it, and one that knows it must send the same bytes."""
    monkeypatch.setenv("CONVERT_SHLO_TO_SHARDY", "1")
    run = torch_xla_matrix.run("mlp", [*MODEL, "--mesh", "4,2"], 3)["momentum"]
    assert run["compiles"] == [1, 2, 2] and sum(run["wire"]["planned"].values()) > 0
    for executed in run["wire"]["executed"]:
        assert executed == pytest.approx(run["wire"]["planned"], rel=0.2)


def test_the_table_says_what_differs():
    wire = {"planned": {"data": 1000, "model": 0}, "executed": [{"data": 5}, {"data": 1500, "model": 8}]}
    assert torch_xla_matrix.on_the_wire(wire) == "data 1000 (+50.0%), model 0 (8 unplanned)"
    row = {
        "losses": [2.0, 1.0],
        "compiles": [1],
        "split_parameters": 1,
        "split_states": 0,
        "words": ["batch over data"],
    }
    found = {
        "mlp unsharded": {"momentum": {"losses": [2.0, 1.0]}},
        "mlp reordered": {"momentum": {"losses": [2.0, 1.001]}},
        "mlp 8": {"momentum": {**row, "losses": [2.0, 1.01], "wire": wire}},
    }
    line = torch_xla_matrix.table(found, 3).splitlines()[-1]
    assert line.startswith("| mlp | 8 | momentum | 1.0e-02 (above what is allowed) | 1.0e-03 | 1 | 1 parameters")
