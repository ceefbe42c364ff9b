"""Reading Shardy's op sharding rules from their textual form."""

import dataclasses
import functools
import re

from autoshard.graph._records import FactorKind, Rule


_RULE = re.compile(r"<\((.*)\)->\((.*)\) \{(.*?)\}(.*)>$")
_FACTOR = re.compile(r"[i-z](?:_\d+)?")
_SIZE = re.compile(r"([i-z](?:_\d+)?)=(\d+)")
_SPECIAL = re.compile(r"(reduction|need_replication|permutation)=\{([^}]*)\}")


@functools.lru_cache(maxsize=8192)
def parse_rule(text: str) -> Rule:
    """`#sdy.op_sharding_rule<([i, j])->([i]) {i=8, j=4} reduction={j}>` as a `Rule`.

    Factor letters run i..z, then z_1, z_2, ... (openxla/shardy, `dialect.cc`, `factorSymbolString`).
    """
    match = _RULE.search(text)
    if match is None:
        no_sizes = re.search(r"<\((.*)\)->\((.*)\)(.*)>$", text)
        if no_sizes is None:
            raise ValueError(f"not a sharding rule: {text}")
        operands, results, sizes_text, rest = no_sizes[1], no_sizes[2], "", no_sizes[3]
    else:
        operands, results, sizes_text, rest = match.groups()
    sizes = {name: int(size) for name, size in _SIZE.findall(sizes_text)}
    index = {name: position for position, name in enumerate(sizes)}
    kinds = [FactorKind.PARALLEL] * len(sizes)
    for kind, names in _SPECIAL.findall(rest):
        for name in _FACTOR.findall(names):
            kinds[index[name]] = FactorKind(kind)
    return Rule(tuple(sizes.values()), tuple(kinds), _mappings(operands, index), _mappings(results, index))


def updating_rule(rule: Rule) -> Rule:
    """That of a `dynamic_update_slice`: dims that are sliced may be split where they are updated, not in the update.

    So Shardy in jax 0.10 has it; in 0.11 it says `permutation` of both, and XLA splits them as before.
    """
    kept = {factor for dims in rule.results for dim in dims for factor in dim}
    kinds = (
        kind
        if kind is not FactorKind.PERMUTATION
        else FactorKind.PARALLEL
        if f in kept
        else FactorKind.NEED_REPLICATION
        for f, kind in enumerate(rule.kinds)
    )
    return dataclasses.replace(rule, kinds=tuple(kinds))


def gathering_rule(rule: Rule) -> Rule:
    """Return the rule of a reduction that no collective combines: dims that it reduces stay whole."""
    kinds = (FactorKind.NEED_REPLICATION if kind is FactorKind.REDUCTION else kind for kind in rule.kinds)
    return dataclasses.replace(rule, kinds=tuple(kinds))


def _mappings(text: str, index: dict[str, int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    tensors = []
    for body in re.findall(r"\[([^\]]*)\]", text):
        dims = [d.strip() for d in body.split(",")] if body.strip() else []
        tensors.append(tuple(tuple(index[name] for name in _FACTOR.findall(dim) if name in index) for dim in dims))
    return tuple(tensors)
