"""Shardy's rules as records."""

import types

import pytest
from jaxlib.mlir import ir

from autoshard import mlir
from autoshard.graph import FactorKind, Rule
from autoshard.graph.extraction.shardy_rules import sharding_rule, updating_rule


PARALLEL, REDUCTION = FactorKind.PARALLEL, FactorKind.REDUCTION
WHOLE, PERMUTED = FactorKind.NEED_REPLICATION, FactorKind.PERMUTATION


def parsed(text: str) -> Rule | None:
    """Return the rule of an op with the attribute that MLIR reads from a text."""
    rule = ir.Attribute.parse(f"#sdy.op_sharding_rule<{text}>", mlir.new_context())
    return sharding_rule(types.SimpleNamespace(attributes={"sdy.sharding_rule": rule}))


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
    assert parsed(text) == rule


def test_factors_after_z_are_numbered() -> None:
    letters = [*"ijklmnopqrstuvwxyz", "z_1", "z_2"]
    sizes = ", ".join(f"{name}={n + 2}" for n, name in enumerate(letters))
    rule = parsed(f"([{', '.join(letters)}])->([yzz_1z_2, i]) {{{sizes}}} reduction={{z_1}}")
    assert rule is not None
    assert rule.sizes == tuple(range(2, 22))
    assert rule.operands == (tuple((n,) for n in range(20)),)
    assert rule.results == (((16, 17, 18, 19), (0,)),)
    assert [n for n, kind in enumerate(rule.kinds) if kind is REDUCTION] == [18]


def test_a_dim_of_no_factor_has_none() -> None:
    with mlir.new_context():
        attribute = mlir.rule_attribute([8], ["parallel"], [[[0], []]], [[[0]]])
        rule = sharding_rule(types.SimpleNamespace(attributes={"sdy.sharding_rule": attribute}))
    assert rule == Rule((8,), (PARALLEL,), (((0,), ()),), (((0,),),))


def test_an_op_may_have_no_rule() -> None:
    assert sharding_rule(types.SimpleNamespace(attributes={})) is None


def test_factors_that_only_block_propagation_are_parallel() -> None:
    rule = parsed("([i, j])->([i, j]) {i=8, j=4} blocked_propagation={j}")
    assert rule is not None and rule.kinds == (PARALLEL, PARALLEL)


def test_the_rule_of_an_update_is_the_same_in_both_versions() -> None:
    text = "([i, j], [i, k], [], [])->([i, j]) {i=16, j=64, k=8}"
    until_jax_010, jax_011 = (parsed(f"{text} {kinds}") for kinds in ("need_replication={k}", "permutation={j, k}"))
    assert until_jax_010 is not None and jax_011 is not None
    assert until_jax_010 != jax_011 and updating_rule(until_jax_010) == updating_rule(jax_011) == until_jax_010
