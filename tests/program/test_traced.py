"""Traced programs on disk: used only if every input matches."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from autoshard.base.disk_cache import MOST, cache_directory
from autoshard.errors import UserError
from autoshard.planning import Options, make_plan
from autoshard.planning.record.plan_files import plan_to_json
from autoshard.program import Program, open_source, trace
from autoshard.program.trace_cache import open_config
from tests.graph.programs import f32


class Source:
    """Source that traces, and counts its traces."""

    def __init__(self) -> None:
        self.traced = 0

    def __call__(self) -> Program:
        self.traced += 1
        return trace(lambda params, x: x @ params, (f32(16, 8), f32(8, 16)), name="small")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def opened(source: Source, config: str = "gpt2-tiny", **options: Any) -> Program:
    return open_config(config, {"batch": 8, **options}, source)


def test_the_second_time_nothing_is_traced_and_the_plan_is_the_same(folder: Path) -> None:
    source = Source()
    first, second = opened(source), opened(source)
    assert source.traced == 1 and len(list(folder.iterdir())) == 1
    for name in ("name", "arguments", "results", "module", "fingerprint", "training", "model_flops", "tokens", "notes"):
        assert getattr(first, name) == getattr(second, name), name
    plans = [make_plan(p, Options(topology="cpu:8", mesh="data=4,model=2")).plan for p in (first, second)]
    assert plan_to_json(plans[0]) == plan_to_json(plans[1])


def test_one_from_disk_traces_when_it_is_run(folder: Path) -> None:
    import numpy as np

    source = Source()
    opened(source)
    program = opened(source)
    assert source.traced == 1
    assert program.fn(np.ones((16, 8), np.float32), np.ones((8, 16), np.float32)).shape == (8, 8)
    assert source.traced == 2


@pytest.mark.parametrize("change", ["config", "options", "package", "setting"])
def test_what_decides_the_program_decides_the_entry(folder: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    opened(source)
    if change == "package":
        monkeypatch.setattr("autoshard.base.disk_cache.version", lambda package: "another")
    if change == "setting":
        monkeypatch.setenv("JAX_ENABLE_X64", "1")
    config = "llama-tiny" if change == "config" else "gpt2-tiny"
    opened(source, config, **({"seq": 32} if change == "options" else {}))
    assert source.traced == 2 and len(list(folder.iterdir())) == 2


def test_a_changed_configuration_file_is_another_program(folder: Path, tmp_path: Path) -> None:
    source, config = Source(), tmp_path / "mine.json"
    for layers in (2, 3):
        config.write_text(json.dumps({"model_type": "gpt2", "n_layer": layers}))
        opened(source, str(config))
    assert source.traced == 2


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "another", "text"])
def test_a_damaged_entry_is_traced_again_and_replaced(folder: Path, damage: str) -> None:
    source = Source()
    opened(source)
    (path,) = folder.iterdir()
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {
            "empty": b"",
            "short": good[:-1],
            "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "another": good.replace(path.stem.encode(), b"0" * 64),
            "text": b"not an entry",
        }[damage]
    )
    assert opened(source).module and source.traced == 2
    assert opened(source).module and source.traced == 2, "the entry is whole again"


def test_a_directory_that_cannot_be_used_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "file" / "kept"))
    source = Source()
    with caplog.at_level(logging.WARNING, "autoshard"):
        assert opened(source).module and opened(source).module
    assert source.traced == 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert "cannot be used as a cache (Not a directory); planning goes on without it." in said


def test_a_full_disk_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    source = Source()
    assert opened(source).module
    assert list(folder.iterdir()) == [] and "No space left on device" in caplog.text


def test_the_directory_is_the_variables_or_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AUTOSHARD_CACHE_DIR", raising=False)
    assert cache_directory() == tmp_path / "autoshard"
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", " ")
    assert cache_directory() is None
    source = Source()
    assert opened(source).module and opened(source).module
    assert source.traced == 2 and list(tmp_path.iterdir()) == []


def test_the_oldest_entries_go(folder: Path) -> None:
    folder.mkdir()
    for number in range(MOST + 3):
        (folder / f"{number}.program").write_bytes(b"old")
    source = Source()
    opened(source)
    opened(source)
    assert source.traced == 1 and len(list(folder.iterdir())) == MOST


def test_the_entry_is_text_and_a_module(folder: Path) -> None:
    """Check that no part of the entry is executable: two lines of JSON, then MLIR bytecode."""
    opened(Source())
    (path,) = folder.iterdir()
    first, second, module = path.read_bytes().split(b"\n", 2)
    assert set(json.loads(first)) == {"key", "body"}
    assert {"arguments", "results", "fingerprint"} <= set(json.loads(second))
    assert module.startswith(b"ML\xefR")


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "step.mlirbc"
    path.write_bytes(Source()().module)
    return path


def test_a_module_in_a_file_is_read_once_for_each_content_and_roles(
    folder: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoshard.program import load as _load

    read = []
    load = _load.load_artifact
    monkeypatch.setattr(_load, "load_artifact", lambda path, **said: read.append(said["roles"]) or load(path, **said))
    first, second = (open_source(str(module), kept=True) for _ in range(2))
    assert len(read) == 1
    for name in ("name", "arguments", "results", "module", "fingerprint", "notes", "source"):
        assert getattr(first, name) == getattr(second, name), name
    weight = first.arguments[0].name
    for _ in range(2):
        assert open_source(str(module), kept=True, roles={weight: "batch"}).arguments[0].role == "batch"
    open_source(str(module), kept=True, roles=lambda name: "batch")
    assert len(read) == 3, "what a function says cannot be kept"
    module.write_bytes(trace(lambda x: x + 1, (f32(4),), name="small").module)
    assert len(open_source(str(module), kept=True).arguments) == 1
    assert len(read) == 4


def test_bad_input_is_refused_for_any_saved_state(folder: Path, module: Path) -> None:
    open_source(str(module), kept=True)
    with pytest.raises(UserError, match="`--batch` only applies to `hf:CONFIG`"):
        open_source(str(module), kept=True, batch=8)
    with pytest.raises(UserError, match="is neither an existing file"):
        open_source(str(module) + "x", kept=True)
