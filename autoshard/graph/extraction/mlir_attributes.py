"""Parsers of types, shardings and sharding rules in the text of MLIR attributes."""

import dataclasses
import functools
import re
from typing import Any

from autoshard.graph.records import AxisUse, FactorKind, Rule, Sharding


_TENSOR = re.compile(r"tensor<((?:\d+x)*)(complex<f\d+>|[a-zA-Z0-9]+)(?:,.*)?>")
_DTYPES = {
    "f64": ("float64", 8), "f32": ("float32", 4), "f16": ("float16", 2), "bf16": ("bfloat16", 2),
    "i1": ("bool", 1), "i4": ("int4", 1), "ui4": ("uint4", 1), "i8": ("int8", 1), "ui8": ("uint8", 1),
    "i16": ("int16", 2), "ui16": ("uint16", 2), "i32": ("int32", 4), "ui32": ("uint32", 4),
    "i64": ("int64", 8), "ui64": ("uint64", 8), "f8E4M3FN": ("float8_e4m3fn", 1), "f8E5M2": ("float8_e5m2", 1),
    "complex<f32>": ("complex64", 8), "complex<f64>": ("complex128", 16),
}  # fmt: skip


@functools.lru_cache(maxsize=8192)
def parse_type(text: str) -> tuple[tuple[int, ...], str, int]:
    """Return shape, dtype name and bytes per element of an MLIR tensor type; tokens and tuples have zero bytes."""
    match = _TENSOR.match(text)
    if match is None:
        return (), "token", 0
    dims, element = match.groups()
    shape = tuple(int(d) for d in dims.split("x")[:-1])
    if element not in _DTYPES:
        return shape, element, 1
    dtype, size = _DTYPES[element]
    return shape, dtype, size


_MESH = re.compile(r'"((?:[^"\\]|\\.)*)"\s*=\s*(\d+)')
_AXIS = re.compile(r'"((?:[^"\\]|\\.)*)"(?::\((\d+)\)(\d+))?')
_ONE = re.compile(r"<(?:@([\w.$-]+|\"[^\"]*\")|mesh<[^>]*>),\s*\[(.*?)\](.*?)>(?=\s*(?:,\s*<|\]|$|>))")
_DIM = re.compile(r"\{([^}]*)\}(?:p\d+)?")


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Return axis names and sizes, major first, of a text such as `#sdy.mesh<["data"=4, "model"=2]>`."""
    return tuple((name, int(size)) for name, size in _MESH.findall(text))


def parse_shardings(text: str, meshes: dict[str, tuple[tuple[str, int], ...]]) -> tuple[Sharding, ...]:
    """Return every sharding in the text of a `TensorShardingAttr` or a `TensorShardingPerValueAttr`.

    Priorities are dropped: they order Shardy's propagation, and a plan leaves nothing to propagation.
    """
    shardings = []
    for match in _ONE.finditer(text):
        name, dims, rest = match.groups()
        mesh = meshes.get((name or "").strip('"'), ())
        whole = re.search(r"replicated=\{([^}]*)\}", rest)
        unreduced = re.search(r"unreduced=\{([^}]*)\}", rest)
        shardings.append(
            Sharding(
                tuple(_axes(dim) for dim in _DIM.findall(dims)),
                tuple("?" in dim for dim in _DIM.findall(dims)),
                _axes(whole[1]) if whole else (),
                _axes(unreduced[1]) if unreduced else (),
                mesh,
            )
        )
    return tuple(shardings)


def tiled(attributes: Any, rank: int) -> Sharding:
    """Return the sharding of a `@Sharding` custom call, in GSPMD's form; `unspecified_dims=[1]` leaves dim 1 open."""
    config = str(attributes["backend_config"]) if "backend_config" in attributes else ""
    match = re.search(r"unspecified_dims=\[([\d,]*)\]", config)
    free = {int(n) for n in match[1].split(",") if n} if match else set()
    text = str(attributes["mhlo.sharding"]).strip('"') if "mhlo.sharding" in attributes else "{replicated}"
    return Sharding(((),) * rank, tuple(d in free for d in range(rank)), tiles=text)


def parse_axes(text: str) -> tuple[str, ...]:
    """Return the axis names in a text such as `#sdy<manual_axes{"data", "model"}>`."""
    return tuple(name for name, _, _ in _AXIS.findall(text))


def _axes(text: str) -> tuple[AxisUse, ...]:
    """Return the axes, whole or in parts, in the text of one dim's sharding."""
    return tuple(
        AxisUse(name, (int(before), int(size)) if size else None) for name, before, size in _AXIS.findall(text)
    )


_RULE = re.compile(r"<\((.*)\)->\((.*)\) \{(.*?)\}(.*)>$")
_FACTOR = re.compile(r"[i-z](?:_\d+)?")
_SIZE = re.compile(r"([i-z](?:_\d+)?)=(\d+)")
_SPECIAL = re.compile(r"(reduction|need_replication|permutation)=\{([^}]*)\}")


@functools.lru_cache(maxsize=8192)
def parse_rule(text: str) -> Rule:
    """Parse a text such as `#sdy.op_sharding_rule<([i, j])->([i]) {i=8, j=4} reduction={j}>`.

    Factor letters run i..z, then z_1, z_2, ... (openxla/shardy, `dialect.cc`, `factorSymbolString`). Raises
    `ValueError` if the text is no sharding rule.
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
    """Return the rule of a `dynamic_update_slice`, in which only the updated tensor may be split along sliced dims.

    Shardy in jax 0.10 has this rule. In jax 0.11 Shardy marks the dims of both operands as `permutation`, but XLA
    splits them as before.
    """
    result_factors = {factor for dims in rule.results for dim in dims for factor in dim}
    kinds = (
        kind
        if kind is not FactorKind.PERMUTATION
        else FactorKind.PARALLEL
        if f in result_factors
        else FactorKind.NEED_REPLICATION
        for f, kind in enumerate(rule.kinds)
    )
    return dataclasses.replace(rule, kinds=tuple(kinds))


def gathering_rule(rule: Rule) -> Rule:
    """Return the rule of a reduction that no collective combines: dims that it reduces stay whole."""
    kinds = (FactorKind.NEED_REPLICATION if kind is FactorKind.REDUCTION else kind for kind in rule.kinds)
    return dataclasses.replace(rule, kinds=tuple(kinds))


def _mappings(text: str, index: dict[str, int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the factors of each dim of each tensor in one side of a rule's text."""
    tensors = []
    for body in re.findall(r"\[([^\]]*)\]", text):
        dims = [d.strip() for d in body.split(",")] if body.strip() else []
        tensors.append(tuple(tuple(index[name] for name in _FACTOR.findall(dim) if name in index) for dim in dims))
    return tuple(tensors)
