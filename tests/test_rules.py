"""The notation of sharding rules, and their fit to shapes."""

import re
from typing import Any

import pytest

from autoshard import UserError, register_rule
from autoshard.base.call_rules import bind, forget, parse_call_rule, registered


def test_a_rule_is_read_and_bound() -> None:
    rule = parse_call_rule(
        "attend", "b h s d, b h t d -> b h s d, ", need_replication="d t", reduction=(), flops="4 b h s t d + 2*s"
    )
    bound = bind(rule, [(2, 4, 8, 16), (2, 4, 32, 16)], [(2, 4, 8, 16), ()])
    assert bound.sizes == (2, 4, 8, 16, 32)
    assert bound.kinds == ("parallel", "parallel", "parallel", "need_replication", "need_replication")
    assert bound.operands == (((0,), (1,), (2,), (3,)), ((0,), (1,), (4,), (3,)))
    assert bound.results == (((0,), (1,), (2,), (3,)), ())
    assert bound.flops == 4 * 2 * 4 * 8 * 32 * 16 + 2 * 8


def test_leading_dims_and_dims_of_several_factors() -> None:
    rule = parse_call_rule("k", "... (h e), h e f -> ... f", reduction=["h", "e"])
    bound = bind(rule, [(2, 3, 32), (4, 8, 5)], [(2, 3, 5)])
    assert bound.operands == (((0,), (1,), (2, 3)), ((2,), (3,), (4,)))
    assert bound.sizes == (2, 3, 4, 8, 5)
    assert bound.kinds == ("parallel", "parallel", "reduction", "reduction", "parallel")
    sized = parse_call_rule("k", "(x y) -> x", need_replication="y", sizes={"y": 4})
    assert bind(sized, [(32,)], [(8,)]).sizes == (8, 4)
    # `z` determines `x` in the second dim, and `x` then determines `y` in the first.
    chained = parse_call_rule("k", "(x y), (x z), z -> ")
    assert bind(chained, [(6,), (10,), (5,)], [()]).sizes == (2, 3, 5)
    batched = parse_call_rule("k", "... s -> ... s", need_replication="...")
    assert bind(batched, [(2, 3, 4)], [(2, 3, 4)]).kinds == ("need_replication", "need_replication", "parallel")
    assert bind(parse_call_rule("made", " -> i"), [], [(4,)]).results == (((0,),),)


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("b s d", {}, "the rule of `k` is 'b s d'; expected operands -> results"),
        ("b $ -> b", {}, "the rule of `k` has '$' in 'b $ -> b'; expected names of factors"),
        ("b (s t -> b", {}, "the rule of `k` has a '(' that is not closed"),
        ("b s) -> b", {}, "the rule of `k` has a ')' where none can be"),
        ("b ... -> b", {}, "the rule of `k` has a '...' where none can be"),
        ("b b -> b", {}, "the rule of `k` has `b` twice in one tensor"),
        ("b -> b", {"reduction": "c"}, "the rule of `k` calls `c` a reduction factor, but 'b -> b' has no `c`."),
        ("b -> b", {"reduction": ("b",)}, "the rule of `k` calls `b` a reduction factor, but a result has it as a dim"),
        ("b c -> b", {"reduction": "c", "permutation": "c"}, "gives `c` two kinds: reduction and permutation"),
        ("b -> b", {"sizes": {"z": 2}}, "the rule of `k` has a size for `z`, but 'b -> b' has no `z`."),
        ("b -> b", {"flops": "2 b q"}, "the rule of `k` has flops '2 b q'; expected numbers and factors"),
    ],
)
def test_a_malformed_rule_is_refused(text: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        register_rule("k", text, **options)
    assert registered("k") is None


@pytest.mark.parametrize(
    ("text", "operands", "results", "sentence"),
    [
        ("b -> b", [(2,), (2,)], [(2,)], "has 1 operands, but the call of `k` at mlp has 2; give one group"),
        ("b -> b, b", [(2,)], [(2,)], "has 2 results, but the call of `k` at mlp has 1; give one group"),
        (
            "b s -> b",
            [(2,)],
            [(2,)],
            "gives operand 0 2 dims in 'b s -> b', but the call of `k` at mlp has the shape [2]",
        ),
        ("b -> b", [(2,)], [(3,)], "does not fit: `b` is 2 elsewhere, but 3 in result 0 of the call of `k` at mlp"),
        (
            "(x y) -> x",
            [(9,)],
            [(2,)],
            "the factors `(x y)` make up 2, but operand 0 of the call of `k` at mlp has a dim",
        ),
        ("(x y), (y z) -> ", [(9,), (6,)], [()], "does not say how 9 is made of `(x y)` in operand 0"),
        ("(x y) -> ", [(9,)], [()], "does not say how 9 is made of `(x y)` in operand 0"),
        ("... s -> ...", [(2, 3, 4)], [(2,)], "gives result 0 2 dims in '... s -> ...'"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(text: str, operands: Any, results: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        bind(parse_call_rule("k", text), operands, results, "of `k` at mlp")


def test_registering_by_name() -> None:
    assert register_rule("named", "b s -> b s") is None
    rule = registered("named")
    assert rule is not None and rule.text == "b s -> b s"
    register_rule("named", "b -> b")
    assert registered("named") != rule
    forget("named")
    with pytest.raises(UserError, match=re.escape("register_rule('named') has no rule; give register_rule('named', ")):
        register_rule("named")
    with pytest.raises(UserError, match="static_argnums is for functions"):
        register_rule("named", "b -> b", static_argnums=(1,))
