"""Rules for custom calls on the command line: in the program's own file, and in a file next to a module file."""

import json
from pathlib import Path

import pytest

from autoshard import cli
from autoshard.base.call_rules import forget


RULES = 'import autoshard\n\nautoshard.register_rule("their_kernel", "i j -> i j", flops="2 i j")\n'

MODULE = """
func.func public @main(%x: tensor<64x32xf32>) -> tensor<64x32xf32> {
  %0 = stablehlo.custom_call @their_kernel(%x) {backend_config = ""} : (tensor<64x32xf32>) -> tensor<64x32xf32>
  return %0 : tensor<64x32xf32>
}
"""

STEP = """
import autoshard
import jax
import jax.numpy as jnp


@autoshard.register_rule("m k, k n -> m n", reduction="k", flops="2 m k n")
def product(a, b):
    return a @ b


def program():
    array = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return lambda a, b: jnp.tanh(product(a, b)), (array, array)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_AUTO_SPMD_MESH", raising=False)
    for name, text in {"rules.py": RULES, "kernel.mlir": MODULE, "step.py": STEP, "empty.py": "x = 1\n"}.items():
        Path(name).write_text(text)
    return tmp_path


LIMIT = ["--topology", "cpu:8", "--mesh", "x=8", "--memory-limit", "0.000006"]


def test_rules_with_a_module_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = ["plan", "kernel.mlir", "--topology", "cpu:8", "--mesh", "x=8", "--json", "--out", "plan.json", "--quiet"]
    assert cli.main(without) == 0
    plan = json.loads(Path("plan.json").read_text())
    assert [each["kind"] for each in plan["unruled"]] == ["their_kernel"]
    assert any("autoshard.register_rule(" in line for line in plan["warnings"])
    try:
        assert cli.main(["plan", "kernel.mlir", *LIMIT, "--rules", "rules.py", "--out", "plan.json", "--quiet"]) == 0
    finally:
        forget("their_kernel")
    plan = json.loads(Path("plan.json").read_text())
    assert plan["unruled"] == []
    (call,) = plan["calls"]
    assert (call["name"], call["operands"]) == ("their_kernel", [[["x"], []]])
    assert "x" in capsys.readouterr().out


@pytest.mark.heavy
def test_rules_in_the_program_itself(folder: Path) -> None:
    out = ["--out", "plan.json", "--quiet"]
    assert cli.main(["plan", "step.py", "--topology", "cpu:8", "--mesh", "x=8", *out]) == 0
    (call,) = json.loads(Path("plan.json").read_text())["calls"]
    assert call["name"] == "product"
    assert cli.main(["measure", "step.py", "--plan", "plan.json", "--check", "--steps", "1", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ("none.py", "--rules none.py: there is no such file; give a Python file that calls autoshard.register_rule."),
        ("empty.py", "--rules empty.py registers no rule; call autoshard.register_rule("),
        ("kernel.mlir", "`kernel.mlir` cannot be loaded as Python; give a file that ends in `.py`."),
    ],
)
def test_bad_rules_get_one_sentence(
    folder: Path, rules: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "kernel.mlir", "--topology", "cpu:8", "--rules", rules, "--quiet"]) == 2
    assert sentence in capsys.readouterr().err
