"""Compiled communication that a prediction does not account for."""

from autoshard.exec.hlo.compiled_collectives import CompiledCollective
from autoshard.exec.hlo.unforeseen import Expected, beyond


def compiled(kind: str, wire: dict[str, float], count: int = 1, source: str = "") -> CompiledCollective:
    return CompiledCollective(kind, tuple(wire), wire, 0, count, False, False, False, "c", source)  # type: ignore[arg-type]


def expected(kind: str, axes: str, size: float, count: int = 1) -> Expected:
    return Expected(kind, tuple(axes.split("+")), count, size)


def test_what_is_as_predicted_but_for_padding_is_foreseen():
    assert beyond([compiled("reduce-scatter", {"data": 109.0})], [expected("reduce-scatter", "data", 100.0)], 1.0) == []
    assert beyond([compiled("reduce-scatter", {"data": 130.0})], [expected("reduce-scatter", "data", 100.0)], 1.0) != []


def test_two_gathers_compiled_as_one_are_foreseen():
    one = compiled("all-gather", {"data": 10.0, "model": 90.0}, 8)
    parts = [expected("all-gather", "data", 30.0, count=16), expected("all-gather", "model", 70.0, count=8)]
    assert beyond([one], parts, 1.0) == []


def test_a_sum_is_not_foreseen_by_a_gather():
    total = compiled("all-reduce", {"data": 50.0})
    assert beyond([total], [expected("all-gather", "data", 50.0)], 1.0) == [total]


def test_a_sum_over_more_axes_than_planned_is_blamed_and_nothing_else():
    scattered, summed = expected("reduce-scatter", "model", 60.0), expected("reduce-scatter", "data", 10.0)
    planned = [scattered, summed, expected("all-gather", "model", 40.0)]
    total = compiled("all-reduce", {"data": 30.0, "model": 120.0})
    assert beyond([compiled("all-gather", {"model": 40.0}), total], planned, 1.0) == [total]


def test_permutes_of_one_op_are_one_gather_or_reduction():
    steps = [compiled("collective-permute", {"model": 25.0}, 8, "jit(f)/dot") for _ in range(4)]
    assert beyond(steps, [expected("all-gather", "model", 100.0)], 1.0) == []
    assert beyond(steps, [expected("reduce-scatter", "model", 100.0)], 1.0) == []
    (found,) = beyond(steps, [], 1.0)
    assert found.wire_bytes == 100.0


def test_little_is_let_pass():
    found = [compiled("all-gather", {"model": 100.0}), compiled("all-reduce", {"model": 0.5})]
    assert beyond(found, [expected("all-gather", "model", 100.0)], 1.0) == []


def test_a_sum_over_slices_and_chips_ends_with_a_gather():
    gather, scatter = compiled("all-gather", {"data": 45.0}), compiled("reduce-scatter", {"data": 45.0})
    assert beyond([gather, scatter], [expected("all-reduce", "slice+data", 90.0)], 1.0) == []
    assert beyond([gather], [expected("all-reduce", "data", 90.0)], 1.0) == [gather]


def test_a_whole_sum_is_blamed_rather_than_a_loop_of_permutes():
    loop = [compiled("collective-permute", {"model": 25.0}, 8, "jit(f)/dot") for _ in range(4)]
    total = compiled("all-reduce", {"model": 200.0})
    planned = [expected("reduce-scatter", "model", 100.0), expected("reduce-scatter", "model", 100.0)]
    assert beyond([total, *loop], planned, 1.0) == [total]
