"""Shardy's rule texts as records."""

import pytest

from autoshard.graph import FactorKind, Rule
from autoshard.graph.extraction.mlir_attributes import parse_rule, updating_rule


PARALLEL, REDUCTION = FactorKind.PARALLEL, FactorKind.REDUCTION
WHOLE, PERMUTED = FactorKind.NEED_REPLICATION, FactorKind.PERMUTATION


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            "([i, j, m], [m, k, l])->([i, j, k, l]) {i=8, j=128, k=4, l=16, m=64} reduction={m}",
            Rule(
                (8, 128, 4, 16, 64),
                (PARALLEL, PARALLEL, PARALLEL, PARALLEL, REDUCTION),
                (((0,), (1,), (4,)), ((4,), (2,), (3,))),
                (((0,), (1,), (2,), (3,)),),
            ),
        ),
        (
            "([i, j, k, l])->([i, jkl]) {i=8, j=2, k=3, l=4}",
            Rule((8, 2, 3, 4), (PARALLEL,) * 4, (((0,), (1,), (2,), (3,)),), (((0,), (1, 2, 3)),)),
        ),
        (
            "([i, j], [k])->([i, j]) {i=5, j=8, k=2} reduction={k} need_replication={i} permutation={j}",
            Rule((5, 8, 2), (WHOLE, PERMUTED, REDUCTION), (((0,), (1,)), ((2,),)), (((0,), (1,)),)),
        ),
        (
            "([i, j])->([]) {i=8, j=4} reduction={i, j}",
            Rule((8, 4), (REDUCTION, REDUCTION), (((0,), (1,)),), ((),)),
        ),
        ("([], [])->([])", Rule((), (), ((), ()), ((),))),
        (
            "([i, j])->([k, l], []) {i=8, j=8, k=8, l=8}, custom",
            Rule((8,) * 4, (PARALLEL,) * 4, (((0,), (1,)),), (((2,), (3,)), ())),
        ),
    ],
)
def test_a_rule_is_its_sizes_kinds_and_mappings(text: str, rule: Rule) -> None:
    assert parse_rule(f"#sdy.op_sharding_rule<{text}>") == rule


def test_factors_after_z_are_numbered() -> None:
    letters = [*"ijklmnopqrstuvwxyz", "z_1", "z_2"]
    sizes = ", ".join(f"{name}={n + 2}" for n, name in enumerate(letters))
    rule = parse_rule(f"#sdy.op_sharding_rule<([{', '.join(letters)}])->([yzz_1z_2, i]) {{{sizes}}} reduction={{z_1}}>")
    assert rule.sizes == tuple(range(2, 22))
    assert rule.operands == (tuple((n,) for n in range(20)),)
    assert rule.results == (((16, 17, 18, 19), (0,)),)
    assert [n for n, kind in enumerate(rule.kinds) if kind is REDUCTION] == [18]


def test_a_dim_of_no_factor_has_none() -> None:
    rule = parse_rule("#sdy.op_sharding_rule<([i, 1])->([i]) {i=8}>")
    assert rule.operands == (((0,), ()),)


@pytest.mark.parametrize("text", ["", "#sdy.sharding<@mesh, [{}]>"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a sharding rule"):
        parse_rule(text)


def test_the_rule_of_an_update_is_the_same_in_both_versions() -> None:
    text = "#sdy.op_sharding_rule<([i, j], [i, k], [], [])->([i, j]) {i=16, j=64, k=8}"
    until_jax_010, jax_011 = (
        parse_rule(f"{text} {kinds}>") for kinds in ("need_replication={k}", "permutation={j, k}")
    )
    assert until_jax_010 != jax_011 and updating_rule(until_jax_010) == updating_rule(jax_011) == until_jax_010
