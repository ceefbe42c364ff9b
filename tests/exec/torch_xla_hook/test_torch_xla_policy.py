"""Auto-sharding through `distribute_module`, and the checks of PyTorch/XLA's own test of auto-sharding."""

import math
import os
from typing import Any

import pytest

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.lifecycle.enable import check_version
from tests import forked
from tests.exec.torch_xla_hook.torch_xla_processes import run_checks


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    names = ("our_policy", "distributed_tensor", "their_policy", "upstream_matmul", "upstream_training")
    return run_checks("torch_xla_policy_checks", *names, AUTOSHARD_STRICT="1")


def split(text: str) -> bool:
    return text.startswith("{devices=")


@pytest.mark.full
def test_our_policy_plans_for_the_mesh_it_is_given(found: dict[str, Any]):
    ours = found["our_policy"]
    assert ours["same"] and ours["difference"] < 1e-5
    assert ours["mesh"] == {"x": 2, "y": 4}
    assert any(split(text) for text in ours["parameters"])


def test_pytorch_xlas_policy_plans_for_the_default_mesh(found: dict[str, Any]):
    theirs = found["their_policy"]
    assert theirs["difference"] < 1e-5
    assert theirs["mesh"] == {"data": 8, "model": 1}
    assert any(split(text) for text in theirs["parameters"])


def test_a_distributed_tensor_keeps_its_split(found: dict[str, Any]):
    batch = found["distributed_tensor"]
    assert batch["difference"] < 1e-5
    assert batch["batch"] == "{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    assert batch["shards"] == [[4, 64]] * 8
    assert any("your own mark on batch.0" in sentence for sentence in batch["warnings"])


def test_upstreams_product(found: dict[str, Any]):
    product = found["upstream_matmul"]
    assert product["close"] and product["compiles"] == 1
    assert product["mesh"] == {"data": 8, "model": 1} and any(product["split"])


def test_upstreams_training(found: dict[str, Any]):
    training = found["upstream_training"]
    assert training["compiles"][-1] <= 3 and training["compiles"][2:] == training["compiles"][-1:] * 3
    assert any(split(text) for text in [training["data"], *training["parameters"]])
    # Eight threads of one machine need longer to synchronise than each of them to compute everything.
    assert any(said.startswith("with nothing split a step is predicted to take") for said in training["warnings"])


@pytest.mark.full
def test_what_a_policy_refuses():
    said = run_checks("torch_xla_policy_checks", "wrong_policies")["wrong_policies"]
    assert said["mesh"] == (
        "XLA_AUTO_SPMD_MESH=4,2 says another mesh than the device mesh given to distribute_module, "
        "{'data': 2, 'model': 4}: unset the variable, or give the same mesh."
    )
    assert said["few"] == (
        "XLA_AUTO_SPMD_MESH=3,2 names 6 devices, but PyTorch/XLA sees 8: give sizes whose product is 8."
    )
    assert said["device"].startswith(
        "autoshard.auto_policy plans the first step of PyTorch/XLA, but the device mesh is"
    )
    assert said["moved"].startswith("`0.weight` is on the XLA device already: give distribute_module the module on the")


MOVES = """
import torch, torch_xla.runtime as xr
{ask}
torch.nn.Linear(8, 8).to("xla")
print("moved")
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("ask", "mesh", "sentence"),
    [
        ("xr.use_spmd(auto=True)", "3,2", "XLA_AUTO_SPMD_MESH=3,2 names 6 devices, but PyTorch/XLA sees 8: give sizes"),
        ("", "3,2", "XLA_AUTO_SPMD_MESH=3,2 names 6 devices, but PyTorch/XLA sees 8: give sizes"),
        ("", "x=4,2", "XLA_AUTO_SPMD_MESH=x=4,2: mesh 'x=4,2' names some axes and not others; write all names"),
    ],
)
def test_a_mesh_of_other_devices_is_refused_before_the_first_step(ask: str, mesh: str, sentence: str):
    asked = {} if ask else {"XLA_AUTO_SPMD": "1"}
    here = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "XLA_AUTO_SPMD_MESH": mesh} | asked
    code = "import autoshard.torch_xla\n" + MOVES.format(ask=ask)
    ran = forked.run(["-c", code], env=os.environ | here)
    assert ran.returncode and "moved" not in ran.stdout
    assert sentence in ran.stderr.strip().splitlines()[-1]


@pytest.mark.full
def test_a_mesh_that_is_looked_for():
    environment = {"AUTOSHARD_STRICT": "1", "XLA_AUTO_SPMD_MESH": "auto"}
    row = run_checks("torch_xla_policy_checks", "searched_mesh", **environment)["searched_mesh"]
    assert row["difference"] < 1e-5 and any(split(text) for text in row["parameters"])
    assert math.prod(row["mesh"].values()) == 8 and row["second"] == row["kept"] == row["mesh"]


def test_another_torch_xla_is_refused():
    with pytest.raises(UserError) as error:
        check_version("2.8.1", object())
    assert "auto-sharding works with torch_xla 2.9; this is 2.8.1 and lacks _check_tensor_need_mat" in str(error.value)
    assert str(error.value).endswith("install that version, or train without auto-sharding.")
