"""The searched mesh against meshes that people pick by hand, judged by the TPU compiler.

    python experiments/quality/mesh_quality.py [PROGRAM ...] [--topology T ...] [--plans N] [--again] [--ours] [--table]

The programs and topologies are those of `plan_quality.py`. Our plan is on the searched mesh. One plan by hand is FSDP
on one axis. Others are FSDP with tensor parallelism over 4, 8 and 16 chips, with and without the sequence split. Our
solver completes them.

`--plans` compiles only the N of least predicted step time (default 2). `--ours` compiles our plan alone; the stored
figures of the others, planned with earlier prices, remain. Results are saved by program and topology in
`experiments/results/mesh_quality.json`, so that a broken run resumes.
"""

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.planning import Plan
    from autoshard.program import Program

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.lib.saved_results import Results, checked_out  # noqa: E402
from experiments.quality import plan_quality  # noqa: E402
from experiments.quality.plan_quality import (  # noqa: E402
    PROGRAMS,
    TOPOLOGIES,
    Judgement,
    Row,
    figures_of,
    judge_apart,
    ms,
    row_parser,
    rows_asked,
    summary,
)


HERE = Path(__file__).parents[1]
RESULTS = HERE / "results" / "mesh_quality.json"
TABLE = HERE / "results" / "mesh_quality.md"

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


def judge_ours(row: Row, time_limit: float) -> None:
    """Judge our plan alone again, if other plans of the row are known."""
    from autoshard.planning import Options, make_plan

    results = Results(RESULTS)
    known = results.rows.get(row.name)
    if known is None:
        return
    program = PROGRAMS[row.program](math.prod(TOPOLOGIES[row.topology].values()))()
    searched = make_plan(program, Options(topology=row.topology, mesh="auto")).plan
    ours = {"plan": figures_of(program, searched, time_limit)}
    about = {"mesh": searched.mesh, "code": checked_out(), "others": known.get("others", known["code"])}
    results.keep(row.name, known | about | {"plans": known["plans"] | ours})


def judge(row: Row, time_limit: float, most: int) -> None:
    """Plan, compile and estimate one row."""
    from autoshard.cost import Topology
    from autoshard.planning import Options, make_plan

    topology = row.topology
    program = PROGRAMS[row.program](math.prod(TOPOLOGIES[topology].values()))()
    limit = Topology.parse(topology).usable_bytes
    searched = make_plan(program, Options(topology=topology, mesh="auto")).plan
    by_hand = hand_plans(program, topology)
    order = sorted(
        by_hand,
        key=lambda name: (by_hand[name].prediction.peak_bytes > limit, by_hand[name].prediction.step_time_s),
    )
    plans: dict[str, Any] = {}
    for name in ("plan", *order[:most]):
        print(f"{row.name}: {name}", file=sys.stderr, flush=True)
        plans[name] = figures_of(program, searched if name == "plan" else by_hand[name], time_limit)
    predicted = {name: plan.prediction.step_time_s for name, plan in by_hand.items()}
    about = {"mesh": searched.mesh, "by_hand": predicted, "code": checked_out()}
    results = Results(RESULTS)
    results.keep(row.name, about | {"plans": plans | earlier(results.rows.get(row.name), checked_out())})


def earlier(known: dict[str, Any] | None, code: str) -> dict[str, Any]:
    """Return the compiled plans by hand that earlier prices completed; their names state the commit of these prices."""
    if known is None:
        return {}
    before = known.get("others", known["code"])
    others = {name: figures for name, figures in known["plans"].items() if name != "plan"}
    return {name if ", of " in name else f"{name}, of {before}": f for name, f in others.items() if before != code}


def all_by_hand(name: str, rows: dict[str, Any], others: dict[str, Any], every: bool = False) -> dict[str, Any]:
    """Return our plan of a row, and the compiled plans by hand: here, and on the mesh of `plan_quality.py`.

    With `every` all the baselines that were compiled there are included, otherwise only those picked here.
    """
    mesh = _MESHES[name.split(" | ")[1]]
    more = {
        f"{plan.removesuffix('*')}{'' if plan.endswith('*') else ', propagated,'} {mesh}": figures
        for plan, figures in others.get(name, {"plans": {}})["plans"].items()
        if plan in _HAND_PICKED or (every and plan != "plan")
    }
    return rows[name]["plans"] | more


def in_order(rows: dict[str, Any]) -> list[str]:
    """List the names of the known rows, by program and topology."""
    return [name for program in PROGRAMS for topology in TOPOLOGIES if (name := f"{program} | {topology}") in rows]


_HAND_PICKED = ("fsdp*", "fsdp_tp*", "fsdp_tp_sp*")
_MESHES = {topology: "on " + "x".join(map(str, mesh.values())) for topology, mesh in TOPOLOGIES.items()}


def table(rows: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the results as a page of Markdown; `others` are those of `plan_quality.py`."""
    lines = [
        "# The searched mesh against hand-picked ones, judged by the TPU compiler",
        "",
        "`python experiments/quality/mesh_quality.py`; libtpu, no TPU. `by hand`: of FSDP on one axis and FSDP with",
        "tensor",
        "parallelism over 4, 8 and 16 chips (`sp`: with the sequence split, too) the two of least predicted time, and",
        "those that `plan_quality.md` has on its mesh, the best of them by the compiler.",
        "Times are estimates from the compiler's schedules, judged as in `plan_quality.md`; `ratio`: theirs over ours;",
        "`code`: the commit that planned the row, and after it that of the plans by hand if it is another.",
        "",
        "| program | topology | searched mesh | ours ms | predicted ms | by hand | its ms | ratio | error | judged "
        "| code |",
        "|" + " --- |" * 11,
    ]
    judged: list[Judgement] = []
    for name in in_order(rows):
        row = rows[name]
        plans = all_by_hand(name, rows, others)
        against = Judgement.of(plans)
        judged.append(against)
        mesh = ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
        ours = row["plans"]["plan"]
        its = plans[against.best]["estimated_s"] if against.best else None
        ratio = f"{against.ratio:.3f}" if against.ratio else "-"
        code = row["code"] + (f", {row['others']}" if "others" in row else "")
        lines.append(
            f"| {name} | {mesh} | {ms(ours.get('estimated_s'))} | {ms(ours['predicted_s'])} | {against.best or '-'} | "
            f"{ms(its)} | {ratio} | {against.error:.1%} | {against.word} | {code} |"
        )
    return "\n".join([*lines, *summary(judged), *against_every(rows, others)]) + "\n"


def against_every(rows: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """Return the comparison with all compiled baselines, and the rows whose best baseline is a new one."""
    lines = [
        "",
        "Against every baseline that `plan_quality.md` has compiled on its mesh, too (data and tensor parallelism, and",
        "what XLA's propagation completes), where the best is one of these:",
        "",
        "| program | topology | the best baseline | ratio | error | judged |",
        "|" + " --- |" * 6,
    ]
    judged: list[Judgement] = []
    for name in in_order(rows):
        judgement = Judgement.of(all_by_hand(name, rows, others, every=True))
        judged.append(judgement)
        if judgement.best is not None and judgement.best != Judgement.of(all_by_hand(name, rows, others)).best:
            lines.append(
                f"| {name} | {judgement.best} | {judgement.ratio:.3f} | {judgement.error:.1%} | {judgement.word} |"
            )
    return [*lines, *summary(judged)]


def main() -> int:
    parser = row_parser(__doc__, 2, "hand-picked plans")
    parser.add_argument("--again", action="store_true", help="judge rows that are in the table too")
    parser.add_argument("--ours", action="store_true", help="judge our plan alone again, of rows in the table")
    arguments = parser.parse_args()
    for row in rows_asked(parser, arguments):
        if arguments.inside and arguments.ours:
            judge_ours(row, arguments.time_limit)
        elif arguments.inside:
            judge(row, arguments.time_limit, arguments.plans)
        elif arguments.again or arguments.ours or row.name not in Results(RESULTS).rows:
            judge_apart(__file__, row, arguments, ["--ours"] if arguments.ours else [])
    if not arguments.inside:
        text = table(Results(RESULTS).rows, Results(plan_quality.RESULTS).rows)
        TABLE.write_text(text)
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
