"""Random programs under plans that split them: they compute the unplanned values.

Sixteen of 34 programs run on one of three meshes each, and in full all of them on all meshes.
`experiments/correctness/reliability.py` makes a thousand runs.
"""

import functools
from typing import Any

import pytest

from tests.random_ops import KINDS
from tests.random_programs import RandomProgram, random_program
from tests.random_runs import MESHES, expected, run


@functools.lru_cache(1)
def drawn(seed: int) -> tuple[RandomProgram, list[list[Any]]]:
    """Return a program and its results without a plan."""
    return (program := random_program(seed)), expected(program)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("seed", "mesh"),
    [
        pytest.param(seed, mesh, marks=[] if number == seed % len(MESHES) else [pytest.mark.full])
        for seed in range(34)
        for number, mesh in enumerate(MESHES)
    ],
)
def test_planned_random_programs_compute_the_same(seed: int, mesh: dict[str, int]):
    program, wanted = drawn(seed)
    assert run(program, mesh, wanted) == "split", program.text


def test_programs_take_turns_with_the_kinds_of_op():
    assert random_program(7) == random_program(7) != random_program(8)
    assert len({kind for seed in range(34) for kind in random_program(seed).kinds}) >= 150
    assert len({kind for seed in range(100) for kind in random_program(seed).kinds}) >= 0.9 * len(KINDS)
