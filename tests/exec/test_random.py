"""Random programs under plans that split them: they compute the unplanned values.

A hundred runs; `experiments/correctness/reliability.py` makes a thousand.
"""

import pytest

from tests.random_ops import KINDS
from tests.random_programs import random_program
from tests.random_runs import MESHES, expected, run


@pytest.mark.parametrize("seed", range(34))
def test_planned_random_programs_compute_the_same(seed: int):
    program = random_program(seed)
    wanted = expected(program)
    outcomes = [run(program, mesh, wanted) for mesh in MESHES]
    assert outcomes == ["split"] * len(MESHES), program.text


def test_programs_take_turns_with_the_kinds_of_op():
    assert random_program(7) == random_program(7) != random_program(8)
    assert len({kind for seed in range(34) for kind in random_program(seed).kinds}) >= 150
    assert len({kind for seed in range(100) for kind in random_program(seed).kinds}) >= 0.9 * len(KINDS)
