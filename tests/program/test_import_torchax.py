"""Versions of torch and torchax that match, a refusal for others, and no import of them for JAX programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.errors import UserError
from autoshard.program import from_torch
from autoshard.program.hf.hf_program import from_config
from autoshard.program.torch_ops import torch_imports
from autoshard.program.torch_ops.torchax_environment import environment


REMOVED = "import torch\nmissing = torch.ops.aten.prod.no_such_overload\nhere = torch.ops.aten.prod.dim_int"


def test_torchax_may_name_an_overload_that_this_torch_lacks():
    table = {"__name__": "torchax.tables"}
    with torch_imports.importing_torchax():
        exec(REMOVED, table)
        assert not hasattr(torch.ops.aten.prod, "no_such_overload"), "for torchax alone"
        with pytest.raises(AttributeError):
            exec(REMOVED, {"__name__": "torchaxes"})
    assert table["here"] is torch.ops.aten.prod.dim_int
    assert table["missing"] not in environment()._ops
    with pytest.raises(AttributeError, match="no_such_overload"):
        exec(REMOVED, table)


def test_the_random_state_of_a_process_with_torchax_can_be_forked():
    environment()
    before = torch.get_rng_state()
    for options in ({}, {"device_type": "jax"}):
        with torch.random.fork_rng(**options):
            torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"not installed \(transformers\): pip install transformers\.$"):
        from_config("llama-tiny")
    monkeypatch.setitem(sys.modules, "torchax", None)
    with pytest.raises(UserError, match=r"not installed \(torchax\): pip install torchax\.$"):
        torch_imports.require_torch()


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.8.1+cpu")
    sentence = r"^torch 2\.8\.1\+cpu is too old for torch modules and `hf:` models, which need torch 2\.9 or newer"
    with pytest.raises(UserError, match=sentence):
        from_config("llama-tiny")
    with pytest.raises(UserError, match=sentence):
        from_torch(nn.Linear(2, 2), (torch.ones(1, 2),))


class Refused(nn.Module):
    def forward(self, x):
        raise ValueError("no")


def test_a_torch_that_is_too_new_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError) as error:
        from_torch(Refused(), (torch.ones(1),))
    assert "newer than" not in str(error.value)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(UserError, match=r"ValueError: no in .*; torch 2\.99\.0 is newer than the tested versions 2\.9"):
        from_torch(Refused(), (torch.ones(1),))
    with pytest.raises(UserError, match=r"cannot be loaded with torch 2\.99\.0 \(ImportError: gone\): install"):
        with torch_imports.importing_torchax():
            raise ImportError("gone")


WITHOUT = """
import sys
sys.modules.update(torch=None, torchax=None, transformers=None)
from autoshard.cli import main
sys.exit(main(sys.argv[1:]))
"""
JAX = """
import jax
import jax.numpy as jnp

def program():
    return (lambda w, x: jax.nn.relu(x @ w).sum()), (jnp.ones((64, 64)), jnp.ones((8, 64)))
"""


def test_a_jax_program_is_planned_without_torch(tmp_path: Path):
    (tmp_path / "step.py").write_text(JAX)

    def planned(source: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT, "plan", source, "--topology", "v5e:2x2", "--quiet"]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    done = planned("step.py")
    assert done.returncode == 0, done.stderr
    assert "Planned in" in done.stdout
    refused = planned("hf:llama-tiny")
    assert refused.returncode == 2
    assert refused.stderr == (
        "autoshard: torch modules and `hf:` models need packages that are not installed (torch, torchax, "
        "transformers): pip install torch torchax transformers.\n"
    )
