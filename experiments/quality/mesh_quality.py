"""The searched mesh against meshes that people pick by hand, judged by the TPU compiler.

    python experiments/quality/mesh_quality.py [--only TEXT ...] [--plans N] [--again] [--ours] [--table]

The programs and topologies are those of `plan_quality.py`. Our plan is on the searched mesh. One plan by hand is FSDP
on one axis. Others are FSDP with tensor parallelism over 4, 8 and 16 chips, with and without the sequence split. Our
solver completes them.

`--plans` compiles only the N of least predicted step time (default 2). `--ours` compiles our plan alone; the stored
figures of the others, planned with earlier prices, remain. Results are saved by program and topology in
`experiments/results/mesh_quality.json`, so that a broken run resumes.
"""

import functools
import sys
from typing import TYPE_CHECKING, Any

from experiments.lib.harness import RESULTS, Experiment, Rows, grid, own_parser, page
from experiments.lib.saved_results import Results, checked_out
from experiments.quality.plan_quality import TOPOLOGIES, Judgement, figures_of, ms, program_of, rows, summary


if TYPE_CHECKING:
    from autoshard.planning import Plan
    from autoshard.program import Program


TENSOR = (4, 8, 16)
"""Numbers of chips that tensor parallelism spans."""


def hand_picked(topology: str) -> dict[str, dict[str, int]]:
    """Return the meshes by name; slices are an axis of their own, over which the batch is split."""
    given = TOPOLOGIES[topology]
    outer = {name: size for name, size in given.items() if name not in ("data", "model")}
    inner = given["data"] * given["model"]
    meshes = {"1-D": outer | {"data": inner}}
    for size in TENSOR:
        if inner % size == 0:
            split = {"data": inner // size, "model": size} if inner > size else {"model": size}
            meshes[f"x {size}"] = outer | split
    return meshes


def hand_plans(program: "Program", topology: str) -> "dict[str, Plan]":
    """Return the plans by hand that can be laid out, by name."""
    from autoshard import UserError
    from autoshard.planning import Options, make_plan

    plans = {}
    for called, mesh in hand_picked(topology).items():
        wanted = ("fsdp",) if called == "1-D" else ("fsdp_tp", "fsdp_tp_sp")
        try:
            made = make_plan(program, Options(topology=topology, mesh=mesh))
        except UserError as error:
            print(f"{topology}: {called}: {error}", file=sys.stderr, flush=True)
            continue
        plans |= {f"{name} {called}": made.baseline_plans[name] for name in wanted if name in made.baseline_plans}
    return plans


def judge_ours(name: str, known: dict[str, Any], time_limit: float) -> dict[str, Any]:
    """Judge our plan alone again; the known other plans stay in the row."""
    from autoshard.planning import Options, make_plan

    program = program_of(name)
    searched = make_plan(program, Options(topology=name.split(" | ")[1], mesh="auto")).plan
    ours = {"plan": figures_of(program, searched, time_limit)}
    about = {"mesh": searched.mesh, "code": checked_out(), "others": known.get("others", known["code"])}
    return known | about | {"plans": known["plans"] | ours}


def judge(name: str, known: dict[str, Any] | None, time_limit: float, most: int) -> dict[str, Any]:
    """Plan, compile and estimate one row; the known plans by hand of other prices stay in it."""
    from autoshard.cost import Topology
    from autoshard.planning import Options, make_plan

    topology = name.split(" | ")[1]
    program = program_of(name)
    limit = Topology.parse(topology).usable_bytes
    searched = make_plan(program, Options(topology=topology, mesh="auto")).plan
    by_hand = hand_plans(program, topology)
    order = sorted(
        by_hand,
        key=lambda key: (by_hand[key].prediction.peak_bytes > limit, by_hand[key].prediction.step_time_s),
    )
    plans: dict[str, Any] = {}
    for key in ("plan", *order[:most]):
        print(f"{name}: {key}", file=sys.stderr, flush=True)
        plans[key] = figures_of(program, searched if key == "plan" else by_hand[key], time_limit)
    predicted = {key: plan.prediction.step_time_s for key, plan in by_hand.items()}
    return {"mesh": searched.mesh, "by_hand": predicted, "plans": plans | earlier(known, checked_out())}


def earlier(known: dict[str, Any] | None, code: str) -> dict[str, Any]:
    """Return the compiled plans by hand that earlier prices completed; their names state the commit of these prices."""
    if known is None:
        return {}
    before = known.get("others", known["code"])
    others = {name: figures for name, figures in known["plans"].items() if name != "plan"}
    return {name if ", of " in name else f"{name}, of {before}": f for name, f in others.items() if before != code}


def all_by_hand(name: str, known: Rows, others: Rows, every: bool = False) -> dict[str, Any]:
    """Return our plan of a row, and the compiled plans by hand: here, and on the mesh of `plan_quality.py`.

    With `every` all the baselines that were compiled there are included, otherwise only those picked here.
    """
    mesh = _MESHES[name.split(" | ")[1]]
    more = {
        f"{plan.removesuffix('*')}{'' if plan.endswith('*') else ', propagated,'} {mesh}": figures
        for plan, figures in others.get(name, {"plans": {}})["plans"].items()
        if plan in _HAND_PICKED or (every and plan != "plan")
    }
    return known[name]["plans"] | more


_HAND_PICKED = ("fsdp*", "fsdp_tp*", "fsdp_tp_sp*")
_MESHES = {topology: "on " + "x".join(map(str, mesh.values())) for topology, mesh in TOPOLOGIES.items()}


def table(known: Rows, others: Rows) -> str:
    """Return the results as a page of Markdown; `others` are those of `plan_quality.py`."""
    judged: list[Judgement] = []
    lines = []
    for name, row in known.items():
        plans = all_by_hand(name, known, others)
        against = Judgement.of(plans)
        judged.append(against)
        mesh = ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
        ours = row["plans"]["plan"]
        its = plans[against.best]["estimated_s"] if against.best else None
        cells = [name, mesh, ms(ours.get("estimated_s")), ms(ours["predicted_s"]), against.best or "-", ms(its)]
        lines.append([*cells, *against.cells, row["code"] + (f", {row['others']}" if "others" in row else "")])
    more, against_more = against_every(known, others)
    return page(
        "# The searched mesh against hand-picked ones, judged by the TPU compiler",
        """
`python experiments/quality/mesh_quality.py`; libtpu, no TPU. `by hand`: of FSDP on one axis and FSDP with tensor
parallelism over 4, 8 and 16 chips (`sp`: with the sequence split, too) the two of least predicted time, and
those that `plan_quality.md` has on its mesh, the best of them by the compiler.
Times are estimates from the compiler's schedules, judged as in `plan_quality.md`; `ratio`: theirs over ours;
`code`: the commit that planned the row, and after it that of the plans by hand if it is another.
""",
        grid(
            "program | topology | searched mesh | ours ms | predicted ms | by hand | its ms | ratio | error | judged "
            "| code",
            lines,
        ),
        summary(judged),
        """
Against every baseline that `plan_quality.md` has compiled on its mesh, too (data and tensor parallelism, and
what XLA's propagation completes), where the best is one of these:
""",
        grid("program | topology | the best baseline | ratio | error | judged", more),
        summary(against_more),
    )


def against_every(known: Rows, others: Rows) -> tuple[list[list[object]], list[Judgement]]:
    """Return the rows whose best baseline is another one among all compiled baselines, and all judgements."""
    lines, judged = [], []
    for name in known:
        judgement = Judgement.of(all_by_hand(name, known, others, every=True))
        judged.append(judgement)
        if judgement.best is not None and judgement.best != Judgement.of(all_by_hand(name, known, others)).best:
            lines.append([name, judgement.best, *judgement.cells])
    return lines, judged


def main() -> int:
    parser = own_parser(time_limit=900.0)
    parser.add_argument("--plans", type=int, default=2, help="plans by hand to compile of each row (default: 2)")
    parser.add_argument("--ours", action="store_true", help="judge our plan alone again, of rows in the table")
    given = parser.parse_args()
    known = Results(given.out / "mesh_quality.json").rows

    def work(name: str) -> dict[str, Any]:
        if given.ours:
            return judge_ours(name, known[name], given.time_limit)
        return judge(name, known.get(name), given.time_limit, given.plans)

    return Experiment(
        script=__file__,
        names=[name for name in rows() if name in known or not given.ours],
        work=work,
        table=functools.partial(table, others=Results(RESULTS / "plan_quality.json").rows),
        apart=True,
        is_open=lambda row: given.ours,
    ).run(given)


if __name__ == "__main__":
    sys.exit(main())
