"""Graphs on disk: equal to a fresh extraction, and used only if every input matches."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import msgspec
import pytest
from jax import lax

from autoshard.base.disk_cache import MOST
from autoshard.graph import OpGraph, cached_graph, graph_cache, read_graph
from autoshard.program import Program, flash_attention, trace
from tests.graph.programs import convolutions, decoder, decoding, f32, mlp, views


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(graph_cache, "registrations", lambda: 0)  # other tests of this process register rules
    return tmp_path / "kept"


def by_hand() -> Program:
    """Trace a manual region, and a spec that the program requires."""
    mesh = jax.sharding.AbstractMesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    body = jax.shard_map(
        lambda x: lax.psum(x, "b"), mesh=mesh, in_specs=spec("a", None), out_specs=spec("a", None), check_vma=False
    )
    named = jax.sharding.NamedSharding(mesh, spec("a", None))
    return trace(lambda x: body(lax.with_sharding_constraint(x, named)), (f32(8, 4),))


def kernels() -> Program:
    queries, keys = f32(2, 4, 3, 64, 16), f32(2, 4, 64, 16)
    return trace(lambda q, k, v: flash_attention(q, k, v, causal=True).sum(), (queries, keys, keys))


@pytest.mark.parametrize("make", [mlp, decoder, convolutions, decoding, views, by_hand, kernels])
def test_a_graph_comes_back_as_it_was(make) -> None:
    graph = read_graph(make().module)
    again = msgspec.json.decode(msgspec.json.encode(graph), type=OpGraph)
    assert again == graph and repr(again) == repr(graph), "numbers are of the same types too"


def test_the_second_time_nothing_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, other = mlp().module, views().module
    reads = []
    monkeypatch.setattr(graph_cache, "read_graph", lambda module: reads.append(1) or read_graph(module))
    first, second = cached_graph(module), cached_graph(module)
    assert first == second == read_graph(module) and len(reads) == 1
    assert cached_graph(other) != first and len(reads) == 2
    monkeypatch.setattr(graph_cache, "registrations", lambda: 1)
    assert cached_graph(module) == first and len(reads) == 3, "a registered rule is not in the module"
    assert len(list(folder.iterdir())) == 2


FORGED = {
    "another document": lambda body: [["x"], 3],
    "a text for a number": lambda body: body | {"results": ["0"]},
    "an unknown kind of factor": lambda body: body | {"ops": [op | {"op_class": "x"} for op in body["ops"]]},
    "a pair of three": lambda body: body | {"tensors": [t | {"value": [1, 2, 3]} for t in body["tensors"]]},
    "no tensors": lambda body: {key: value for key, value in body.items() if key != "tensors"},
}
"""Bodies with the right hash that are no graphs."""


@pytest.mark.parametrize("damage", ["short", "flipped", *FORGED])
def test_a_damaged_entry_is_read_again_and_replaced(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoshard.base.disk_cache import write_entry

    module = mlp().module
    expected = cached_graph(module)
    (path,) = folder.iterdir()
    good = path.read_bytes()
    if damage in FORGED:
        body = json.loads(good.partition(b"\n")[2])
        write_entry("graph", path.stem, json.dumps(FORGED[damage](body)).encode())
    else:
        middle = len(good) // 2
        path.write_bytes(good[:-1] if damage == "short" else good[:middle] + b"~" + good[middle + 1 :])
    assert cached_graph(module) == expected
    assert path.read_bytes() == good


def test_a_directory_that_cannot_be_used_costs_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("in the way")
    module = mlp().module
    assert cached_graph(module) == cached_graph(module) == read_graph(module)
    assert len(caplog.records) == 1 and "cannot be used as a cache" in caplog.text


def test_only_so_many_are_preserved(folder: Path) -> None:
    folder.mkdir()
    for number in range(MOST + 3):
        (folder / f"{number}.graph").write_bytes(b"old")
    (folder / "1.program").write_bytes(b"of another kind")
    cached_graph(mlp().module)
    assert len(list(folder.glob("*.graph"))) == MOST and len(list(folder.glob("*.program"))) == 1


@pytest.mark.heavy
def test_a_second_plan_starts_no_framework(folder: Path, tmp_path: Path) -> None:
    """Plan again without importing jax or torch, since the program and its ops are cached."""
    path = tmp_path / "step.mlirbc"
    path.write_bytes(mlp().module)
    code = (
        "import sys; from autoshard.planning import Options, Running, make_plan; "
        "from autoshard.program import open_source; "
        "program = open_source(sys.argv[1], kept=True); "
        "made = make_plan(program, Options(topology=sys.argv[2], mesh='data=2,model=2'), Running(kept=True)); "
        "print('jax' in sys.modules, 'torch' in sys.modules, round(made.plan.prediction.step_time_s * 1e12))"
    )

    def planned(topology: str) -> str:
        done = subprocess.run([sys.executable, "-c", code, str(path), topology], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    cold, warm, other = planned("v5e:2x2"), planned("v5e:2x2"), planned("v5p:2x2x1")
    assert cold.split()[0] == "True"
    assert warm.split()[:2] == other.split()[:2] == ["False", "False"]
    assert cold.split()[2] == warm.split()[2]
