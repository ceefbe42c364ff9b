"""Chip files are strict, and dtype names find their row of the peak table."""

import json
import pathlib

import pytest

from autoshard.cost import Chip, chip_names, dtype_class, load_chip, load_chip_file
from autoshard.errors import UserError


def _written(tmp_path: pathlib.Path, change: dict, drop: str = "") -> pathlib.Path:
    data = json.loads((pathlib.Path(load_chip.__code__.co_filename).parent / "chips" / "v5e.json").read_text()) | change
    data.pop(drop, None)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    return path


def test_known_chips() -> None:
    assert set(chip_names()) == {"v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "h200", "cpu"}
    assert all(isinstance(load_chip(name), Chip) for name in chip_names())


@pytest.mark.parametrize(
    ("alias", "name"), [("v4p", "v4"), ("V5Lite", "v5e"), ("v5", "v5p"), ("trillium", "v6e"), ("v7x", "tpu7x")]
)
def test_aliases(alias: str, name: str) -> None:
    assert load_chip(alias).name == name


@pytest.mark.parametrize("name", ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "h200", "cpu"])
def test_every_figure_has_a_source(name: str) -> None:
    chip = load_chip(name)
    assert set(chip.sources) == {"peak_flops_per_s", "memory", "usable_bytes_per_device", "links", "network", "vmem"}
    assert all(chip.sources.values())


def test_a_file_of_ones_own(tmp_path: pathlib.Path) -> None:
    chip = load_chip_file(_written(tmp_path, {"name": "v5e-fast", "memory_bytes_per_s": 1.6e12}))
    assert (chip.name, chip.memory_bytes_per_s, chip.mxu_edge) == ("v5e-fast", 1.6e12, 128)


@pytest.mark.parametrize(
    ("change", "drop", "message"),
    [
        ({}, "hbm_bytes", "mine.json misses hbm_bytes; a chip file has exactly the keys name, aliases"),
        ({"hbm_gb": 16}, "", "mine.json has the unknown key hbm_gb; a chip file has"),
        ({"hbm_gb": 16}, "hbm_bytes", "misses hbm_bytes and has the unknown key hbm_gb"),
        ({"hbm_bytes": 1.5}, "", "hbm_bytes is 1.5, expected a whole number >= 0"),
        ({"cores_per_chip": 0}, "", "cores_per_chip is 0, expected at least 1"),
        ({"memory_bytes_per_s": "fast"}, "", "memory_bytes_per_s is 'fast', expected a number"),
        ({"peak_flops_per_s": {"bf16": 1}}, "", "peak_flops_per_s has bf16, expected bf16, f32, int8, fp8"),
    ],
)
def test_wrong_file(tmp_path: pathlib.Path, change: dict, drop: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_chip_file(_written(tmp_path, change, drop))


def test_unreadable_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="none.json cannot be read: No such file"):
        load_chip_file(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"name": ')
    with pytest.raises(UserError, match="half.json is not JSON"):
        load_chip_file(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="list.json holds a list, expected an object"):
        load_chip_file(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        ("bf16", "bf16"), ("torch.bfloat16", "bf16"), ("float16", "bf16"), ("f32", "f32"), ("float64", "f32"),
        ("i8", "int8"), ("int4", "int8"), ("f8E4M3FN", "fp8"), ("float8_e5m2", "fp8"), ("i32", "f32"), ("bool", "f32"),
    ],
)  # fmt: skip
def test_dtype_names(dtype: str, row: str) -> None:
    assert dtype_class(dtype) == row
