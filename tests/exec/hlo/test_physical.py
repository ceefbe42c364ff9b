"""Links that a group of devices spans, and the cost of a collective on them."""

import pytest

from autoshard.cost import Collectives, Segment, Topology, load_calibration, make_mesh
from autoshard.exec import read_collectives
from autoshard.exec.hlo.physical_links import group_segments, permute_seconds, route
from autoshard.exec.hlo.schedule_estimate import estimate


V5E = Topology.parse("v5e:4x4")
V5P = Topology.parse("v5p:4x4x4")


@pytest.mark.parametrize(
    ("topology", "members", "wanted"),
    [
        (V5E, (0, 1, 2, 3), [Segment("y", "torus", 4, 1, False)]),
        (V5E, (0, 4, 8, 12), [Segment("x", "torus", 4, 1, False)]),
        (V5E, (0, 2), [Segment("y", "torus", 2, 2, False)]),
        (V5E, (5, 6, 9, 10), [Segment("x", "torus", 2, 1, False), Segment("y", "torus", 2, 1, False)]),
        (V5P, (0, 16, 32, 48), [Segment("x", "torus", 4, 1, True)]),
        (V5P, (0, 32), [Segment("x", "torus", 2, 2, True)]),
        (V5E, (0, 1, 2, 7), None),
        (V5E, (0, 1, 3), None),
    ],
)
def test_groups_span_physical_axes(topology, members, wanted):
    segments_of_group = group_segments(topology, members)
    assert (None if segments_of_group is None else list(segments_of_group)) == wanted


def test_a_group_of_a_mesh_axis_is_priced_like_the_axis():
    mesh = make_mesh(V5P, {"data": 16, "model": 4})
    prices, calibration = Collectives(mesh), load_calibration("v5p")
    for axis, members in (("model", mesh.device_order[:4]), ("data", mesh.device_order[::4])):
        segments = group_segments(V5P, members)
        assert segments is not None
        found = route(V5P, calibration, segments).prices
        for kind in ("all-gather", "all-reduce", "all-to-all"):
            ours = float(found.time(kind, ("group",), 1 << 28))
            assert ours == pytest.approx(float(prices.time(kind, (axis,), 1 << 28)))


def test_a_permute_takes_its_longest_way_and_its_fullest_link():
    calibration, size = load_calibration("v5e"), 1 << 26
    link = size / (V5E.chip.link_oneway_bytes_per_s * calibration.link_efficiency)

    def seconds(pairs: list[tuple[int, int]]) -> float:
        return permute_seconds(V5E, calibration, pairs, size)[0] - calibration.collective_launch_s

    assert seconds([(0, 1), (1, 2), (2, 3)]) == pytest.approx(link)
    # A line: the permute back crosses every link in the other direction, and two of its two-step sends share one.
    assert seconds([(0, 1), (1, 2), (2, 3), (3, 0)]) == pytest.approx(link)
    assert seconds([(0, 2), (1, 3)]) == pytest.approx(2 * link)
    assert seconds([(0, 3), (1, 2)]) == pytest.approx(2 * link)
    assert permute_seconds(V5P, load_calibration("v5p"), [(0, 48)], 8)[1] == {"x-"}, "round the ring"
    tpu7x = Topology.parse("tpu7x:2x2x1")
    assert permute_seconds(tpu7x, load_calibration("tpu7x"), [(0, 1), (1, 2)], 8)[1] == {"y+"}
    assert permute_seconds(tpu7x, load_calibration("tpu7x"), [(0, 1), (1, 0)], 8)[1] == {"die"}
    # One device of each chip uses the chip's link alone; two devices share it.
    alone, shared = (
        permute_seconds(tpu7x, load_calibration("tpu7x"), p, 1 << 28)[0] for p in ([(0, 2)], [(0, 2), (1, 3)])
    )
    assert shared == pytest.approx(2 * alone, rel=0.01)
    assert permute_seconds(V5E, calibration, [], size) == (0.0, frozenset())


def test_half_an_axis_is_priced_as_half_an_axis():
    mesh = make_mesh(V5E, {"data": 4, "model": 4})
    halves = "{{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}"
    text = (
        "HloModule m, is_scheduled=true, num_partitions=16\n\n"
        "ENTRY %main (p: bf16[4096,4096]) -> bf16[8192,4096] {\n  %p = bf16[4096,4096] parameter(0)\n"
        f"  ROOT %g = bf16[8192,4096] all-gather(%p), replica_groups={halves}, dimensions={{0}}\n}}\n"
    )
    (found,) = read_collectives(text, mesh)
    assert found.axes == ("model",) and found.members == (0, 1) and found.group == 2
    size = 8192 * 4096 * 2
    line = route(V5E, load_calibration("v5e"), (Segment("y", "torus", 2, 1, False),)).prices
    assert estimate(text, mesh).exposed_comm_s == pytest.approx(float(line.time("all-gather", ("group",), size)))


def test_a_shift_each_way_runs_at_once():
    mesh = make_mesh(V5P, {"data": 16, "model": 4})
    ring = mesh.device_order[:4]
    places = [mesh.device_order.index(device) for device in ring]
    there = ",".join(f"{{{a},{b}}}" for a, b in zip(places, places[1:] + places[:1], strict=True))
    back = ",".join(f"{{{b},{a}}}" for a, b in zip(places, places[1:] + places[:1], strict=True))

    def seconds(*pairs: str) -> float:
        starts = "".join(
            f"  %s{n} = (bf16[4096,4096], bf16[4096,4096]) collective-permute-start(%p), "
            f"source_target_pairs={{{each}}}\n"
            for n, each in enumerate(pairs)
        )
        ends = "".join(f"  %e{n} = bf16[4096,4096] collective-permute-done(%s{n})\n" for n in range(len(pairs)))
        text = (
            "HloModule m, is_scheduled=true, num_partitions=64\n\n"
            "ENTRY %main (p: bf16[4096,4096]) -> bf16[4096,4096] {\n  %p = bf16[4096,4096] parameter(0)\n"
            f"{starts}{ends}  ROOT %t = (bf16[4096,4096]) tuple(%e0)\n}}\n"
        )
        return estimate(text, mesh).step_time_s

    assert seconds(there, back) == pytest.approx(seconds(there)) == pytest.approx(seconds(back))
    assert seconds(there, there) == pytest.approx(2 * seconds(there))
