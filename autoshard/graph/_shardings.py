"""The program's own shardings, from the textual form of Shardy's attributes: constraints, and regions by hand."""

import re
from typing import Any

from autoshard.graph._records import AxisUse, Sharding


_MESH = re.compile(r'"((?:[^"\\]|\\.)*)"\s*=\s*(\d+)')
_AXIS = re.compile(r'"((?:[^"\\]|\\.)*)"(?::\((\d+)\)(\d+))?')
_ONE = re.compile(r"<(?:@([\w.$-]+|\"[^\"]*\")|mesh<[^>]*>),\s*\[(.*?)\](.*?)>(?=\s*(?:,\s*<|\]|$|>))")
_DIM = re.compile(r"\{([^}]*)\}(?:p\d+)?")


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """`#sdy.mesh<["data"=4, "model"=2]>` as names and sizes, major first."""
    return tuple((name, int(size)) for name, size in _MESH.findall(text))


def parse_shardings(text: str, meshes: dict[str, tuple[tuple[str, int], ...]]) -> tuple[Sharding, ...]:
    """Every sharding in the text of a `TensorShardingAttr` or a `TensorShardingPerValueAttr`.

    Priorities are left out: they order Shardy's propagation, and a plan leaves nothing to propagation.
    """
    found = []
    for match in _ONE.finditer(text):
        name, dims, rest = match.groups()
        mesh = meshes.get((name or "").strip('"'), ())
        whole = re.search(r"replicated=\{([^}]*)\}", rest)
        unreduced = re.search(r"unreduced=\{([^}]*)\}", rest)
        found.append(
            Sharding(
                tuple(_axes(dim) for dim in _DIM.findall(dims)),
                tuple("?" in dim for dim in _DIM.findall(dims)),
                _axes(whole[1]) if whole else (),
                _axes(unreduced[1]) if unreduced else (),
                mesh,
            )
        )
    return tuple(found)


def tiled(attributes: Any, rank: int) -> Sharding:
    """The sharding of a `@Sharding` custom call, in GSPMD's form; `unspecified_dims=[1]` leaves dims open."""
    config = str(attributes["backend_config"]) if "backend_config" in attributes else ""
    match = re.search(r"unspecified_dims=\[([\d,]*)\]", config)
    free = {int(n) for n in match[1].split(",") if n} if match else set()
    text = str(attributes["mhlo.sharding"]).strip('"') if "mhlo.sharding" in attributes else "{replicated}"
    return Sharding(((),) * rank, tuple(d in free for d in range(rank)), tiles=text)


def parse_axes(text: str) -> tuple[str, ...]:
    """Names of the axes in `#sdy<manual_axes{"data", "model"}>`."""
    return tuple(name for name, _, _ in _AXIS.findall(text))


def _axes(text: str) -> tuple[AxisUse, ...]:
    return tuple(
        AxisUse(name, (int(before), int(size)) if size else None) for name, before, size in _AXIS.findall(text)
    )
