"""Collectives that the TPU compiler hides behind compute, by generation: the basis of `Calibration`'s overlaps.

    python experiments/fidelity/overlap.py [--only TEXT ...] [--again] [--table]

A decoder of 8 layers is compiled for each topology with no TPU, with FSDP within a slice and a copy on every slice. Its
schedule is walked (`autoshard.exec.estimate`).

The table is `experiments/results/overlap.md`. It lists gathers, sums and permutes within a slice, and all traffic
between slices. For each it has the milliseconds on the links and the share that compute hides. Compiled programs are
stored under `build/overlap`.
"""

import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from autoshard.exec import Estimate

from experiments.lib.harness import Experiment, Rows, grid, own_parser, page
from experiments.lib.saved_results import compiled
from experiments.quality.plan_quality import PROGRAMS


TOPOLOGIES = ("v3:4x4", "v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x4", "v5e:4x4*2", "v6e:4x4*2")
CLASSES = {
    "gathers": ("all-gather",),
    "sums": ("reduce-scatter", "all-reduce"),
    "permutes": ("collective-permute",),
}


def judged(topology: str, time_limit: float) -> "Estimate":
    """Estimate the schedule of the decoder on a topology.

    Raises `UserError` if it cannot be compiled.
    """
    from autoshard.cost import Topology, make_mesh
    from autoshard.exec import estimate
    from autoshard.planning import Options, make_plan

    machine = Topology.parse(topology)
    slices = machine.slices
    mesh = {"slice": slices} if slices > 1 else {}
    program = PROGRAMS["decoder 2048"](machine.num_devices)()
    made = make_plan(program, Options(topology=topology, mesh=mesh | {"data": machine.num_devices // slices}))
    plan = made.baseline_plans["fsdp"]
    return estimate(compiled("overlap", program, plan, time_limit).text, make_mesh(machine, plan.mesh))


def hidden(found: "Estimate", kinds: tuple[str, ...] | None, far: bool) -> str:
    """Return the milliseconds on the links, and the share that compute hides, of some kinds or (None) of all."""
    mine = [t for (kind, between), t in found.traffic.items() if between == far and (kinds is None or kind in kinds)]
    sent, waited = sum(t.sent_s for t in mine), sum(t.waited_s for t in mine)
    return f"{1e3 * sent:.2f}, {max(0.0, 1 - waited / sent):.0%}" if sent else "-"


def work(topology: str, time_limit: float) -> dict[str, list[str]]:
    """Compute the cells of one row."""
    schedule = judged(topology, time_limit)
    cells = [hidden(schedule, kinds, far=False) for kinds in CLASSES.values()]
    return {"cells": [*cells, hidden(schedule, None, far=True)]}


def table(rows: Rows) -> str:
    return page(
        "# What compute hides in the schedules of the TPU compiler",
        """
`python experiments/fidelity/overlap.py`; libtpu, no TPU. A decoder with FSDP within a slice: milliseconds on the
links in one step, and the share of them that compute does not wait for.
""",
        grid(
            f"topology | {' | '.join(CLASSES)} | between slices", ([name, *row["cells"]] for name, row in rows.items())
        ),
    )


def main() -> int:
    given = own_parser(time_limit=900.0).parse_args()
    return Experiment(
        script=__file__, names=TOPOLOGIES, work=lambda name: work(name, given.time_limit), table=table
    ).run(given)


if __name__ == "__main__":
    sys.exit(main())
