"""The calibration file: strict, hashed, and replaceable by a user's own."""

import dataclasses
import json
import pathlib
import re

import pytest

from autoshard.cost import Calibration, Compute, Topology, chip_names, figure_names, load_calibration, save_calibration
from autoshard.errors import UserError


@pytest.mark.parametrize("chip", chip_names())
def test_every_chip_has_every_figure_with_source_and_date(chip: str) -> None:
    calibration = load_calibration(chip)
    assert set(calibration.values()) == set(figure_names()) == set(calibration.sources)
    for name, source in calibration.sources.items():
        assert re.search(r".+ \(\d{4}-\d{2}-\d{2}\)$", source), name
    for name in ("matmul_efficiency", "memory_efficiency", "link_efficiency", "network_efficiency"):
        assert 0 < getattr(calibration, name) <= 1


def test_hash_follows_figures_only() -> None:
    one = load_calibration("v5e")
    assert one.hash() == load_calibration("v5lite").hash() and re.fullmatch(r"[0-9a-f]{12}", one.hash())
    assert dataclasses.replace(one, sources={}).hash() == one.hash()
    assert dataclasses.replace(one, hop_s=2e-6).hash() != one.hash()
    assert load_calibration("v5p").hash() != one.hash()


def test_ideal_leaves_peaks() -> None:
    topology = Topology.parse("v5p:2x2x1")
    compute = Compute(topology, Calibration.ideal("v5p"))
    assert compute.op_seconds(4.59e14, 0) == pytest.approx(1.0)
    assert compute.memory_seconds(2.8e12) == pytest.approx(1.0)


def test_ones_own_figures_replace_the_shipped_ones(tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "mine.json"
    save_calibration(mine, "v5e", {"matmul_efficiency": 0.5}, "my machine", "2026-01-02")
    save_calibration(mine, "v5p", {"hop_s": 2e-6}, "my machine", "2026-01-03")
    save_calibration(mine, "v5e", {"hop_s": 3e-6}, "my machine", "2026-01-04")
    loaded, shipped = load_calibration("v5e", mine), load_calibration("v5e")
    assert (loaded.matmul_efficiency, loaded.hop_s) == (0.5, 3e-6)
    assert loaded.memory_efficiency == shipped.memory_efficiency
    assert loaded.sources["hop_s"] == "my machine (2026-01-04)"
    assert loaded.hash() != shipped.hash()
    assert load_calibration("v6e", mine) == load_calibration("v6e")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


FIGURE = {"value": 1, "source": "s", "date": "2026-01-01"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "must be an object with exactly the keys schema and chips"),
        ({"schema": 2, "chips": {}}, "has schema 2, this version reads 1"),
        ({"schema": 1, "chips": {"v5x": {}}}, "unknown chip 'v5x'"),
        ({"schema": 1, "chips": {"v5e": {"speed": FIGURE}}}, "v5e has the unknown figure speed; known are matmul_eff"),
        (
            {"schema": 1, "chips": {"v5e": {"hop_s": {"value": 1}}}},
            "v5e.hop_s must have exactly the keys value, source",
        ),
        (
            {"schema": 1, "chips": {"v5e": {"hop_s": {**FIGURE, "value": -1}}}},
            "v5e.hop_s is -1, expected a number from 0 to 1",
        ),
        (
            {"schema": 1, "chips": {"v5e": {"matmul_efficiency": {**FIGURE, "value": 0}}}},
            "v5e.matmul_efficiency is 0, expected a number from 0.001 to 20",
        ),
        (
            {"schema": 1, "chips": {"v5e": {"gather_max_group": {**FIGURE, "value": float("inf")}}}},
            "v5e.gather_max_group is inf, expected a number from 0 to 1.09951e",
        ),
        (
            {"schema": 1, "chips": {"v5e": {"gather_overlap": {**FIGURE, "value": 85}}}},
            "v5e.gather_overlap is 85, expected a number from 0 to 1",
        ),
        (
            {"schema": 1, "chips": {"v5e": {"hop_s": {**FIGURE, "value": "1us"}}}},
            "v5e.hop_s is '1us', expected a number",
        ),
    ],
)
def test_wrong_file(tmp_path: pathlib.Path, document: object, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=message):
        load_calibration("v5e", path)


def test_unreadable_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="none.json cannot be read: No such file"):
        load_calibration("v5e", tmp_path / "none.json")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(UserError, match="half.json is not JSON"):
        load_calibration("v5e", tmp_path / "half.json")


def test_nothing_is_written_for_a_wrong_figure(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="unknown figure speed"):
        save_calibration(tmp_path / "mine.json", "v5e", {"speed": 1.0}, "s", "2026-01-01")
    assert not list(tmp_path.iterdir())


def test_a_file_of_ones_own_can_be_named_in_the_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.json"
    save_calibration(mine, "v5e", {"matmul_efficiency": 0.5}, "my machine", "2026-01-02")
    monkeypatch.setenv("AUTOSHARD_CALIBRATION", str(mine))
    assert load_calibration("v5e").matmul_efficiency == 0.5
    assert load_calibration("v5p") == load_calibration("v5p", mine)
    monkeypatch.setenv("AUTOSHARD_CALIBRATION", str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="none.json cannot be read"):
        load_calibration("v5e")
