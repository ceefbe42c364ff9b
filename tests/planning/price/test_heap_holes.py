"""Holes of the heap, by hand and as libtpu 0.0.52 placed the buffers of a compiled step."""

import pytest

from autoshard.planning.price.device_memory import LiveBuffer
from autoshard.planning.price.heap_placement import heap_holes


END = 1000


def held(*members: tuple[int, int, int]) -> list[LiveBuffer]:
    return [LiveBuffer(*each, "temporaries", number) for number, each in enumerate(members)]


def test_a_small_value_that_outlives_its_large_neighbour_makes_a_hole() -> None:
    # The second large value does not fit below the small one, which ends at 110.
    members = held((10, 20, 100), (15, 60, 10), (30, 40, 104))
    assert heap_holes(members, END, 114) == 214 - 114
    assert heap_holes(held((10, 20, 104), (15, 60, 10), (30, 40, 104)), END, 114) == 0


def test_a_value_takes_the_smallest_hole_that_has_room() -> None:
    members = [(1, 10, 50), (2, 90, 1), (3, 10, 30), (4, 90, 1), (20, 90, 25), (30, 90, 50)]
    assert heap_holes(held(*members), END, 82) == 0
    # In the larger hole a value of 25 would leave no room for one of 50.
    assert heap_holes(held(*members[:4], (20, 90, 35), (30, 90, 40)), END, 82) == 122 - 82


def test_a_collective_writes_its_result_once_the_operands_are_freed() -> None:
    members = held((10, 21, 100), (20, 60, 10), (30, 40, 104))
    assert heap_holes(members, END, 114) == 100
    assert heap_holes(members, END, 114, later={1}) == 0


def test_arguments_results_and_small_values_are_in_no_hole() -> None:
    members = held((10, 20, 2_000_000), (15, 60, 10), (30, 40, 2_000_004))
    assert heap_holes(members, END, 2_000_014) == 0
    large = held((10, 20, 100), (30, 40, 104))
    for other in (LiveBuffer(15, END, 10, "gradients", 7), LiveBuffer(0, 60, 10, "batch", 7)):
        assert heap_holes([*large, other], END, 110) == 0


def test_holes_are_those_of_a_compiled_graph_network() -> None:
    """Compare with seven buffers of a compiled step for v6e, in MiB, from their live ranges and offsets."""
    members = [
        # First and last instruction, size, offset.
        (11, 87, 4, 0), (15, 150, 1, 4), (20, 31, 256, 5), (25, 61, 4, 261), (28, 61, 4, 265),
        (39, 126, 1, 5), (40, 127, 1, 6), (45, 46, 256, 269),
    ]  # fmt: skip
    buffers = held(*((first, last + 1, size) for first, last, size, _ in members))
    live = max(sum(size for first, last, size, _ in members if first <= moment <= last) for moment in range(200))
    assert live + heap_holes(buffers, END, live) == max(at + size for *_, size, at in members)


@pytest.mark.parametrize("size", [0, 100])
def test_values_of_one_size_make_no_holes(size: int) -> None:
    assert heap_holes(held((1, 9, size), (2, 5, size), (6, 8, size)), END, 200) == 0
