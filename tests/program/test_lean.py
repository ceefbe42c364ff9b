"""Imports without modules that models never need: stubbed if possible, and restored if they are needed."""

import importlib
import sys
from pathlib import Path

import pytest

from autoshard.program.torch_ops import torch_imports


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules, among them an `accelerate` that is not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch_imports, "_lean", False)
    for name in ("accelerate", "lean_optional", "lean_required"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "accelerate.py").write_text("")
    (tmp_path / "lean_optional.py").write_text(
        "import importlib.util\nhas = importlib.util.find_spec('accelerate') is not None\nif has: import accelerate\n"
    )
    (tmp_path / "lean_required.py").write_text("import accelerate\n")
    return tmp_path


def test_what_is_optional_is_left_out_of_a_process_of_our_own_only(code: Path) -> None:
    assert torch_imports.import_model_code("lean_optional").has
    for name in ("accelerate", "lean_optional"):
        del sys.modules[name]
    torch_imports.import_lean()
    assert not torch_imports.import_model_code("lean_optional").has
    assert "accelerate" not in sys.modules
    importlib.import_module("accelerate")  # it can be imported afterwards


def test_one_that_is_here_already_stays(code: Path) -> None:
    here = importlib.import_module("accelerate")
    torch_imports.import_lean()
    assert torch_imports.import_model_code("lean_optional").has
    assert sys.modules["accelerate"] is here


def test_what_cannot_do_without_gets_it(code: Path) -> None:
    torch_imports.import_lean()
    assert torch_imports.import_model_code("lean_required").accelerate is sys.modules["accelerate"]
    with pytest.raises(ModuleNotFoundError, match="lean_missing"):
        torch_imports.import_model_code("lean_missing")
