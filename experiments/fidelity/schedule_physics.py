"""Estimates from compiled schedules against bare physics: bytes over bandwidth, FLOPs over peak, wire over links.

    python experiments/fidelity/schedule_physics.py [--only TEXT ...] [--again]

Two programs of each kind of `lib/programs/ordinary_programs.py` are planned and compiled for `TOPOLOGY`. A device moves
its HBM bytes at the chip's full bandwidth, multiplies at the full peak, and sends at the full rate of its links. A step
takes at least the longest of the three, with all links busy. It should take at most `MOST` times their sum, with one
link busy in one direction. Rows outside of this interval are listed with the kinds of time that make them.
"""

import functools
import sys
from typing import TYPE_CHECKING, Any

from experiments.fidelity.ordinary import MESHES, name_of
from experiments.lib.harness import Experiment, Rows, grid, own_parser, page
from experiments.lib.programs.ordinary_programs import kind_of, ordinary


if TYPE_CHECKING:
    from autoshard.exec.hlo.hlo_text import Computation, HloModule

TOPOLOGY = "v5e:2x4"
MOST = 2.5
"""Factor by which an estimate may exceed the sum of its parts: efficiencies below the peaks, overheads and waits."""
EACH = 2
"""Programs of each kind."""
LINKS = 4
"""One-way links of a device in a torus of two dims: both directions of both."""


def programs() -> list[str]:
    """Return the names of the rows: the first seeds of every kind."""
    seeds: dict[str, list[int]] = {}
    for seed in range(160):
        if len(seeds.setdefault(kind_of(seed), [])) < EACH:
            seeds[kind_of(seed)].append(seed)
    return [name_of(seed, TOPOLOGY) for seed in sorted(sum(seeds.values(), []))]


def judge(name: str) -> dict[str, Any]:
    """Plan and compile one program: seconds of bare physics, and those of the estimate by kind."""
    from autoshard.cost import Topology
    from autoshard.exec import compile_plan
    from autoshard.exec.hlo.hlo_text import parse_hlo
    from autoshard.planning import Options, make_plan

    seed, topology, mesh = name.split()
    assert topology in MESHES
    sizes = {axis: int(size) for axis, _, size in (part.partition("=") for part in mesh.split(","))}
    program = ordinary(int(seed))
    found = compile_plan(program, make_plan(program, Options(topology=topology, mesh=sizes)).plan, quick=True)
    module, place = parse_hlo(found.hlo), Topology.parse(topology)
    moved, flops_s = _work(module, module.computations[module.entry], place)
    wire = sum(each.wire_bytes for each in found.collectives)
    timed = found.estimate
    assert timed is not None
    return {
        "kind": kind_of(int(seed)),
        "hbm_s": moved / place.memory_bytes_per_s,
        "flops_s": flops_s,
        "wire_s": wire / place.chip.link_oneway_bytes_per_s,
        "estimate_s": timed.step_time_s,
        "by_kind": timed.by_kind,
    }


def _work(module: "HloModule", computation: "Computation", topology: Any) -> tuple[float, float]:
    """Return HBM bytes and seconds of FLOPs at the peak of a computation and of the loops in it, with all trips."""
    from autoshard.cost import dtype_class
    from autoshard.exec.hlo.instruction_work import Reader
    from autoshard.exec.hlo.trip_counts import trip_count

    reader, moved, seconds = Reader(module), 0.0, 0.0
    for op in computation.instructions:
        if op.opcode in ("while", "conditional", "call"):
            called = [(op.attribute(key) or "").lstrip("%") for key in ("body", "to_apply")]
            inner = [
                _work(module, module.computations[each], topology)
                for each in (*called, *op.called)
                if each in module.computations and (op.opcode != "while" or each == called[0])
            ]
            times = (trip_count(module, op) or 1) if op.opcode == "while" else 1
            most = max(inner, default=(0.0, 0.0))
            moved, seconds = moved + times * most[0], seconds + times * most[1]
        elif not op.opcode.endswith("-done"):
            work = reader.work(computation, op)
            moved += work.hbm_bytes
            seconds += sum(x.flops * x.passes / topology.peak_flops(dtype_class(x.dtype)) for x in work.matmuls)
    return moved, seconds


def bounds(row: dict[str, Any]) -> tuple[float, float]:
    """Return the least and the most seconds of a step by bare physics."""
    parts = (row["hbm_s"], row["flops_s"], row["wire_s"])
    return max(*parts[:2], row["wire_s"] / LINKS), MOST * sum(parts)


def table(known: Rows) -> str:
    """Return the page: every row with its bounds, then the rows outside of them."""
    lines, outside = [], []
    for name, row in known.items():
        least, most = bounds(row)
        inside = least <= row["estimate_s"] <= most
        figures = (row["hbm_s"], row["flops_s"], row["wire_s"], least, row["estimate_s"], most)
        lines.append([name, row["kind"], *(f"{1e3 * each:.2f}" for each in figures), "yes" if inside else "**no**"])
        if not inside:
            largest = sorted(row["by_kind"].items(), key=lambda item: -item[1])[:3]
            parts = ", ".join(f"{kind} {1e3 * seconds:.2f} ms" for kind, seconds in largest)
            side = "below the least" if row["estimate_s"] < least else "above the most"
            outside.append(f"- {name} ({row['kind']}): {side}; most of the estimate is {parts}")
    return page(
        "# Estimates from schedules against bare physics",
        f"""
`python experiments/fidelity/schedule_physics.py`; libtpu, no devices. Milliseconds of one device of {TOPOLOGY}. HBM is
the traffic of the compiled program at full bandwidth, FLOPs are at the peak, and wire is over one link in one
direction. `least` is the longest of the three, with {LINKS} links busy. `most` is {MOST} times their sum.
Launches of instructions and latencies of collectives are in no part: a step of less than a millisecond may exceed it.
""",
        grid("row | kind | HBM: | FLOPs: | wire: | least: | estimate: | most: | inside", lines),
        [f"{len(lines) - len(outside)} of {len(lines)} estimates are inside.", *outside],
    )


def main() -> int:
    return Experiment(script=__file__, names=programs(), work=functools.cache(judge), table=table).run(
        own_parser().parse_args()
    )


if __name__ == "__main__":
    sys.exit(main())
