"""States over the factors of an op as states over the dims of its tensors."""

from collections.abc import Sequence

from autoshard.plan.xla._states import WHOLE, States, relabel


def factor_states(states: States, dims: Sequence[Sequence[int]]) -> States:
    """States over an op's factors as states over the dims of one of its tensors; other factors are dropped."""
    count = int(states.max(initial=0)) + 1
    mapping = [WHOLE] * max(count, max((f + 1 for dim in dims for f in dim), default=0))
    for dim, factors in enumerate(dims):
        for factor in factors:
            mapping[factor] = dim
    return relabel(states, mapping)
