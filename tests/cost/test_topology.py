"""Topologies: every slice name, every shape rule, numbering of devices, and errors for wrong text."""

import json
import os
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost import Topology, slice_names
from autoshard.errors import UserError


SLICES = json.loads((pathlib.Path(__file__).parent / "data" / "slices.json").read_text())["slices"]


@pytest.mark.parametrize("name", SLICES)
def test_every_slice_name(name: str) -> None:
    shape, devices, wrap = SLICES[name]
    topology = Topology.parse(name)
    assert "x".join(map(str, topology.shape)) == shape
    assert topology.num_devices == devices
    assert "".join("1" if w else "0" for w in topology.wrap) == wrap[: len(topology.shape)]
    assert Topology.parse(topology.name) == topology


def test_slice_names_are_the_whole_table() -> None:
    assert set(slice_names()) == set(SLICES)


@pytest.mark.parametrize(
    ("text", "name", "shape", "slices", "devices", "wrap"),
    [
        ("v5e:4x4", "v5e:4x4", (4, 4), 1, 16, (False, False)),
        ("v5litepod-16", "v5e:4x4", (4, 4), 1, 16, (False, False)),
        ("v5lite:16x8", "v5e:8x16", (8, 16), 1, 128, (False, True)),
        ("v5p:4x4x8", "v5p:4x4x8", (4, 4, 8), 1, 128, (True, True, True)),
        ("v5p:8x4x4", "v5p:4x4x8", (4, 4, 8), 1, 128, (True, True, True)),
        ("v5p-128*4", "v5p:4x4x4*4", (4, 4, 4), 4, 256, (True, True, True)),
        ("v4:2x2x1", "v4:2x2x1", (2, 2, 1), 1, 4, (False, False, False)),
        ("v6e:16x16*2", "v6e:16x16*2", (16, 16), 2, 512, (True, True)),
        ("v5e:2x2x1", "v5e:2x2", (2, 2), 1, 4, (False, False)),
        ("tpu7x-8", "tpu7x:2x2x1", (2, 2, 1), 1, 8, (False, False, False)),
        ("ironwood:4x4x4", "tpu7x:4x4x4", (4, 4, 4), 1, 128, (True, True, True)),
        ("h100:8*4", "h100:8*4", (8,), 4, 32, (False,)),
        ("h200:8", "h200:8", (8,), 1, 8, (False,)),
        ("cpu:8", "cpu:8", (8,), 1, 8, (False,)),
        ("v4:4x8x8_twisted", "v4:4x8x8_twisted", (4, 8, 8), 1, 256, (True, True, True)),
        ("v5p:8x4x4_twisted*2", "v5p:4x4x8_twisted*2", (4, 4, 8), 2, 256, (True, True, True)),
        ("v4:4x4x8_untwisted", "v4:4x4x8", (4, 4, 8), 1, 128, (True, True, True)),
        ("v2-512", "v2:16x16", (16, 16), 1, 512, (True, True)),
        ("v3:32x16", "v3:16x32", (16, 32), 1, 1024, (False, True)),
        (" v5e:1x1 ", "v5e:1x1", (1, 1), 1, 1, (False, False)),
    ],
)
def test_forms(text: str, name: str, shape: tuple, slices: int, devices: int, wrap: tuple) -> None:
    topology = Topology.parse(text)
    assert (topology.name, topology.shape, topology.slices, topology.num_devices, topology.wrap) == (
        name, shape, slices, devices, wrap,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "usable_gib", "peak"),
    [
        ("v4:2x2x1", 30.75, 2.75e14),
        ("v5e:4x4", 15.75, 1.97e14),
        ("v3:2x2", 15.48, 0.7e14),
        ("v5p:2x2x1", 95.73, 4.59e14),
        ("v6e:4x4", 31.24, 9.2e14),
        ("tpu7x:2x2x1", 94.74, 2.307e15 / 2),
    ],
)
def test_limits_of_one_device(text: str, usable_gib: float, peak: float) -> None:
    topology = Topology.parse(text)
    assert topology.usable_bytes == pytest.approx(usable_gib * 2**30, abs=1)
    assert topology.peak_flops("bfloat16") == peak


def test_cpu_devices_share_one_machine() -> None:
    one, eight = Topology.parse("cpu:1"), Topology.parse("cpu:8")
    assert eight.usable_bytes == one.usable_bytes // 8
    assert eight.peak_flops("f32") * 8 == pytest.approx(one.peak_flops("f32"))
    assert eight.memory_bytes_per_s * 8 == pytest.approx(one.memory_bytes_per_s)
    assert one.peak_flops("f32") == one.chip.peak_flops("f32") * one.host_cores


def test_cpu_devices_share_the_cores_of_the_machine_or_the_stated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Topology.parse("cpu:8")
    assert machine.host_cores == os.cpu_count() and "@" not in machine.name
    said = Topology.parse("cpu:8@3")
    assert (said.host_cores, said.name, said.num_devices) == (3, "cpu:8@3", 8)
    assert Topology.parse(said.name) == said
    assert said.peak_flops("f32") == pytest.approx(machine.peak_flops("f32") * 3 / machine.host_cores)
    if hasattr(os, "sched_setaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
        assert Topology.parse("cpu:8") == machine, "what a process may use just now changes nothing"


@pytest.mark.parametrize("text", ["cpu:8@0", "cpu:8@99999", "v5e:4x4@2", "cpu:8@", "cpu:8@2*2", "v5litepod-16@2"])
def test_cores_that_cannot_be(text: str) -> None:
    with pytest.raises(UserError, match="share cores|is not of the form"):
        Topology.parse(text)


@given(st.sampled_from(["v5e:4x8", "v5p:2x2x4", "v5p:4x4x4*2", "tpu7x:2x2x2*3", "h100:8*4", "cpu:6"]), st.data())
def test_coords_number_devices_row_major(text: str, data: st.DataObject) -> None:
    topology = Topology.parse(text)
    device = data.draw(st.integers(0, topology.num_devices - 1))
    index, xyz, core = topology.coords(device)
    assert topology.device_at(index, xyz, core) == device
    assert 0 <= index < topology.slices and 0 <= core < topology.devices_per_chip
    if device + 1 < topology.num_devices:
        assert topology.coords(device + 1) > (index, xyz, core)


def test_physical_axes_multiply_to_the_devices() -> None:
    axes = Topology.parse("tpu7x:4x4x8*2").physical_axes
    assert [(axis.name, axis.size, axis.kind, axis.wrap) for axis in axes] == [
        ("slice", 2, "network", False),
        ("x", 4, "torus", True),
        ("y", 4, "torus", True),
        ("z", 8, "torus", True),
        ("core", 2, "die", False),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e:4x5", "v5e has no shape 4x5; it has 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        ("v5e:32x32", "v5e has no shape 32x32; .*; beyond one slice write v5e:SHAPE\\*SLICES"),
        ("v5p:4x4x6", "v5p has no shape 4x4x6; it has 2x2x1, 2x2x2, 2x2x4, 2x4x4, and shapes of whole 4x4x4 cubes"),
        ("v6e:64", "v6e has no shape 64; it has 1x1, .*, 16x16; the slice v6e-64 is v6e:8x8$"),
        ("v6e:60", "v6e has no shape 60; it has 1x1, .*, 16x16$"),
        ("v5p:0x4x4", "v5p has no shape 0x4x4"),
        ("v5p:4x4", "v5p has no shape 4x4"),
        ("v4:16x16x32", "v4 has no shape 16x16x32: 8192 chips, at most 4096 exist in a slice"),
        ("v5q:4x4", "unknown chip 'v5q'; did you mean v5"),
        ("v5x:4x4", "unknown chip 'v5x'; did you mean v5 or v5p or v5e"),
        ("zzzz:4", "unknown chip 'zzzz'; known chips are a100, b200, cpu, gb200, h100, h200, tpu7x, v2, v3, v4"),
        ("h10:8", "unknown chip 'h10'; did you mean h100"),
        ("v5p-100", "unknown slice 'v5p-100'; the nearest that exist are v5p-32, v5p-64, v5p-128"),
        ("v6e-big", "unknown slice 'v6e-big'; the nearest that exist are v6e-"),
        ("h100-8", "h100 has no slice names \\(found 'h100-8'\\); write a shape such as h100:8"),
        ("v5e", "topology 'v5e' is not of the form CHIP:SHAPE"),
        ("v5e:4xx4", "'4xx4' is not a shape such as 4x4"),
        ("v5e:4x4*0", "has 0 slices, expected at least 1"),
        ("h100:16", "h100 has no shape 16; write h100:N with N = 1..8 GPUs in an island; 16 are 2 islands: h100:8\\*2"),
        ("h100:12", "no whole islands of 8, the nearest are h100:8\\*1 or \\*2; 12 in equal parts are h100:6\\*2"),
        ("gb200:97", "97 are no whole islands of 72, the nearest are gb200:72\\*1 or \\*2$"),
        ("v4:4x4x12_twisted", "v4:4x4x12 has no twisted form: KxKx2K and Kx2Kx2K made of whole cubes"),
        ("v4:2x2x4_twisted", "v4:2x2x4 has no twisted form: KxKx2K and Kx2Kx2K made of whole cubes are"),
        ("v5e:8x16_twisted", "v5e:8x16 has no twisted form: only 3-D tori have"),
        ("v4:4x4x8_twist", "topology 'v4:4x4x8_twist' is not of the form CHIP:SHAPE"),
        ("cpu:4*2", "cpu:4\\*2 asks for 2 machines; cpu topologies are one machine"),
        ("", "topology '' is not of the form"),
    ],
)  # fmt: skip
def test_wrong_text(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Topology.parse(text)
    assert "\n" not in str(caught.value)


def test_no_such_device() -> None:
    with pytest.raises(UserError, match=re.escape("device 16 is not in v5e:4x4, which has devices 0..15")):
        Topology.parse("v5e:4x4").coords(16)
