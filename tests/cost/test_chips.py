"""Chip files are strict, and dtype names find their row of the peak table."""

import json
import pathlib
from collections.abc import Iterator

import pytest

from autoshard.cost import (
    Chip,
    calibration,
    chip_names,
    chip_of_kind,
    dtype_class,
    figure_names,
    load_calibration,
    load_chip,
    load_chip_file,
)
from autoshard.cost import chip as _chip
from autoshard.errors import UserError


def _written(tmp_path: pathlib.Path, change: dict, drop: str = "") -> pathlib.Path:
    data = json.loads((pathlib.Path(load_chip.__code__.co_filename).parent / "chips" / "v5e.json").read_text()) | change
    data.pop(drop, None)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    return path


def test_known_chips() -> None:
    assert set(chip_names()) >= {"v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "h200", "cpu"}
    assert all(isinstance(load_chip(name), Chip) for name in chip_names())


@pytest.mark.parametrize(
    ("alias", "name"), [("v4p", "v4"), ("V5Lite", "v5e"), ("v5", "v5p"), ("trillium", "v6e"), ("v7x", "tpu7x")]
)
def test_aliases(alias: str, name: str) -> None:
    assert load_chip(alias).name == name


@pytest.mark.parametrize("name", chip_names())
def test_every_chip_has_all_figures_of_its_calibration(name: str) -> None:
    assert set(load_calibration(name).sources) == set(figure_names())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("TPU v2", "v2"), ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v5", "v5p")),
        *(("tpu v5p", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"), ("TPU 7x", "tpu7x")),
    ],
)
def test_what_the_runtime_calls_a_device(kind: str, name: str) -> None:
    chip = chip_of_kind(kind)
    assert chip is not None and chip.name == name
    assert chip_of_kind(f"{kind}9") is None


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
        ({"cores_per_chip": 0}, "", "cores_per_chip is 0, expected 1 to 1024"),
        ({"memory_bytes_per_s": "fast"}, "", "memory_bytes_per_s is 'fast', expected a number"),
        ({"peak_flops_per_s": {"bf16": 1}}, "", "peak_flops_per_s has bf16, expected bf16, f32, int8, fp8"),
        (
            {"peak_flops_per_s": dict.fromkeys(("bf16", "f32", "int8", "fp8"), 197)},
            "",
            "peak_flops_per_s of bf16 is 197, ",
        ),
        ({"memory_bytes_per_s": 819}, "", r"memory_bytes_per_s is 819, expected 1e\+09 to 1e\+15"),
        ({"memory_bytes_per_s": float("nan")}, "", r"memory_bytes_per_s is nan, expected 1e\+09 to"),
        ({"memory_bytes_per_s": True}, "", "memory_bytes_per_s is True, expected a number"),
        ({"network_bytes_per_s_per_chip": 0}, "", r"network_bytes_per_s_per_chip is 0, expected 1e\+07 to 1e\+13$"),
        ({"devices_per_chip": 2}, "", "die_link_oneway_bytes_per_s is 0, expected"),
        ({"hbm_bytes": 8 * 10**9}, "", "usable_bytes_per_device is 16911433728, expected at most 8.59e.09, a device's"),
        ({"backend": "TPU"}, "", "backend is 'TPU', expected tpu or gpu or cpu"),
        ({"name": "v9 lite"}, "", "name is 'v9 lite', expected a lower-case word"),
        ({"aliases": "v9"}, "", "aliases is 'v9', expected a list"),
        ({"aliases": ["v9", "V9e"]}, "", "aliases is ..v9', 'V9e'., expected lower-case texts"),
        ({"device_kinds": []}, "", "device_kinds is .., expected JAX's device_kind of a TPU"),
        ({"small_shapes": [[4, 4], [4, 4, 4]]}, "", r"small_shapes is \[4, 4, 4\], expected 2 whole numbers >= 1"),
        ({"host_shape": []}, "", "host_shape is .., expected 2 whole numbers"),
        ({"host_shape": [300, 2]}, "", "host_shape is .300, 2., expected at most 128 chips"),
        ({"wrap_rule": "cubes of 4"}, "", "wrap_rule is 'cubes of 4', expected 'length N, for axes of N chips'"),
        ({"cube_edge": 4}, "", "cube_edge is 4, expected 0 on a torus of 2 dims"),
        ({"small_shapes": [[8, 4]]}, "", r"small_shapes is \[8, 4\], expected \[4, 8\], as it is looked up"),
        ({"max_chips": 64}, "", r"small_shapes is \[8, 16\], expected at most 64 chips, the max_chips"),
        ({"peak_flops_per_s": {}}, "", "peak_flops_per_s has nothing, expected bf16, f32, int8, fp8"),
        ({"fused_gathers": "yes"}, "", "fused_gathers is 'yes', expected none, by flag or by default"),
        ({"sources": {"memory": "a blog"}}, "", "sources is .'memory'., expected one text for each of"),
    ],
)
def test_wrong_file(tmp_path: pathlib.Path, change: dict, drop: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_chip_file(_written(tmp_path, change, drop))
    assert str(caught.value).startswith(f"chip file {tmp_path / 'mine.json'}") and "\n" not in str(caught.value)


@pytest.fixture
def chips(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder of chip files with one of v5e, read in place of the shipped one."""
    folder = tmp_path / "chips"
    folder.mkdir()
    _written(tmp_path, {}).rename(folder / "v5e.json")
    monkeypatch.setattr(_chip, "_FOLDER", folder)
    _chip._chips.cache_clear()
    yield folder
    monkeypatch.undo()
    _chip._chips.cache_clear()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mine", {"name": "v9"}, "mine.json: name is 'v9', expected 'mine', as the file is called"),
        (
            "v9",
            {"name": "v9", "device_kinds": ["TPU v9"]},
            "v9.json: aliases has 'v5lite', which v5e is called already",
        ),
        ("v9", {"name": "v9", "aliases": []}, "v9.json: device_kinds has 'TPU v5 lite', which v5e is called already"),
    ],
)
def test_two_chips_of_one_name(chips: pathlib.Path, tmp_path: pathlib.Path, name: str, change: dict, message: str):
    json_of = json.loads((chips / "v5e.json").read_text())
    (chips / f"{name}.json").write_text(json.dumps(json_of | change))
    with pytest.raises(UserError, match=message):
        load_chip("v5e")


def test_a_chip_without_calibration(chips: pathlib.Path) -> None:
    json_of = json.loads((chips / "v5e.json").read_text())
    (chips / "v9.json").write_text(json.dumps(json_of | {"name": "v9", "aliases": [], "device_kinds": ["TPU v9"]}))
    for name in set(json.loads(calibration._FILE.read_text())["chips"]) - {"v5e"}:
        other = json_of | {"name": name, "aliases": [], "device_kinds": [f"TPU {name}"]}
        (chips / f"{name}.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="calibration.json misses matmul_efficiency, .* of v9, a chip of cost/chips"):
        load_calibration("v9")


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
