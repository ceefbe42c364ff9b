"""PyTorch/XLA's own tests of SPMD, with and without auto-sharding: only intended differences remain."""

from pathlib import Path

import pytest

from tests.scripts import load_script


pytest.importorskip("torch_xla")

spmd = load_script("experiments/torch_xla/torch_xla_spmd.py")
BASE = """
import unittest
import torch_xla.runtime as xr

class Base(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        xr.use_spmd()
"""
FILE = """
import os, sys
import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC
import base_of_tests


class Marks(base_of_tests.Base):
    def test_a_mark_that_the_planned_mesh_cannot_express_is_preserved(self):
        model = torch.nn.Linear(16, 64).to("xla")
        xs.mark_sharding(model.weight, xs.Mesh(np.arange(8), (2, 4)), (1, None))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(8, 16).to("xla")).square().sum().backward()
            optimizer.step()
            torch_xla.sync()
            held = _XLAC._get_xla_sharding_spec(model.weight)
            self.assertTrue(held.startswith("{devices=[4,1,2]0,4,1,5,2,6,3,7"), held)

    def test_planned(self):
        self.assertTrue(not [name for name in sys.modules if "torch_xla_hook" in name], "autoshard is there")

    @unittest.skip("not on CPU")
    def test_skipped(self):
        pass
""".replace("import os, sys", "import os, sys, unittest")


@pytest.mark.full
def test_what_differs_is_reported_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "spmd"
    folder.mkdir(parents=True)
    (folder / "base_of_tests.py").write_text(BASE)
    (folder / "test_marks.py").write_text(FILE)
    row = spmd.row_of(folder / "test_marks.py", tmp_path)
    assert (row["tests"], row["both"], row["wrong"]) == (3, 1, {})
    assert row["neither"] == {"test_skipped": "skipped: not on CPU"}
    (hooked, unhooked) = row["differ"]["test_planned"]
    assert "autoshard is there" in hooked and unhooked == "passed"
    text = spmd.table({"test_marks.py": row | {"code": "abc"}})
    assert "| test_marks.py | 3 | 1 | 1 | 1 | abc |" in text and "test_planned: hooked AssertionError" in text


def test_a_file_that_cannot_be_run_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "test_broken.py"
    path.write_text("raise ImportError('no such thing')\n")
    row = spmd.row_of(path, None)
    assert row["tests"] == 0 and all("no such thing" in row["wrong"][way] for way in ("hooked", "unhooked"))


@pytest.mark.full
def test_our_own_tests_pass_both_ways() -> None:
    row = spmd.row_of(spmd.SHAPES, None)
    assert row["tests"] == row["both"] >= 15
