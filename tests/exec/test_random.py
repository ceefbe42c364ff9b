"""Random programs compute under a plan that splits them what they compute without one.

Thirty runs, and sixty in full; `experiments/reliability.py` makes five hundred.
"""

import pytest

from tests.random_programs import random_program
from tests.random_runs import MESHES, expected, run


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(10, 20))])
def test_planned_random_programs_compute_the_same(seed: int):
    program = random_program(seed)
    wanted = expected(program)
    found = [run(program, mesh, wanted) for mesh in MESHES]
    assert all(each == "split" or each.startswith("refused: no mesh axis") for each in found), (found, program.text)


def test_a_program_is_the_same_for_its_seed_alone():
    assert random_program(7) == random_program(7) != random_program(8)
    kinds = "".join(random_program(seed).text for seed in range(100))
    for word in ("einsum", "conv_general", "take(", ".at[", "scan", "while_loop", "cond(", "sort(", "reshape", "grad("):
        assert word in kinds
