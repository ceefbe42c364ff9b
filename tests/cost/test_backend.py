"""Backends: their differences are defined in one place, and chips and topologies have a backend."""

import ast
from pathlib import Path

import autoshard
from autoshard.cost import BACKENDS, Topology, chip_names, load_chip


PACKAGE = Path(autoshard.__file__).parent
HOME = PACKAGE / "cost" / "backend.py"


def told_apart(source: str) -> list[int]:
    """Return the lines that compare an expression called a backend with a backend's name."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        named = any(isinstance(each, ast.Constant) and each.value in BACKENDS for each in sides)
        if named and any(
            ast.unparse(each).endswith(("backend", 'data["backend"]', "data['backend']")) for each in sides
        ):
            lines.append(node.lineno)
    return lines


def test_a_comparison_with_the_name_of_a_backend_is_found():
    assert told_apart("if topology.backend == 'tpu': pass\nx = 'cpu' != data['backend']\ny = kind == 'cpu'") == [1, 2]


def test_nothing_tells_backends_apart_by_their_names():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        if path != HOME
        for line in told_apart(path.read_text())
    ]
    assert not wrong, "ask `Topology.traits`, and say there what sets the backend apart"


def test_chips_and_topologies_have_the_traits_of_their_backend():
    assert {load_chip(name).traits.name for name in chip_names()} == set(BACKENDS)
    for text in ("v5e:4x4", "h100:8", "cpu:8"):
        topology = Topology.parse(text)
        assert topology.traits is topology.chip.traits is BACKENDS[topology.backend]


def test_traits_of_each_backend():
    tpu, gpu, cpu = (BACKENDS[name] for name in ("tpu", "gpu", "cpu"))
    assert tpu.torus and not gpu.torus and not cpu.torus
    assert cpu.shares_machine and not cpu.overlaps and cpu.judge == "measure"
    assert [each.platform for each in (tpu, gpu, cpu)] == ["tpu", "cuda", "cpu"]
    assert [each.name for each in BACKENDS.values() if each.compiles_ahead] == ["tpu"]
