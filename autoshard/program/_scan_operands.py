"""The operands of a scan in a jaxpr."""

from typing import Any


def scan_operands(equation: Any) -> tuple[int, int]:
    """Return how many operands of a scan are constant, and how many are carried; the others are sliced.

    The equation has numbers in jax 0.10, and a tree of all operands in 0.11.
    """
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constant, carried, _ = params["ft_in"].unpack()
    return len(constant), len(carried)
