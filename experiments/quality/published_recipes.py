"""Recipes found for published training runs, compared with the recipes that they ran with: remat and batch.

    python experiments/quality/published_recipes.py [--only TEXT ...] [--again] [--whole] [--search] [--table]

A row is a published run of MaxText's (`published.json`) with its model, chips, sequence and compiler flags. The search
covers the batch (the same, twice, half) and, value by value, what layers save, recompute or offload to the host
(MaxText's `remat_policy: custom`). It also covers mesh and sharding, and compiles nothing. Libtpu then compiles the
found plan for its verdict (`--search` leaves that out).

MaxText's own estimator compiles every candidate of its named policies instead. Its cost is the processor time of
compiling the found recipe, times the candidates. Results are saved by row in
`experiments/results/published_recipes.json`, so that a broken run resumes.
"""

import dataclasses
import resource
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from experiments.fidelity.published_runs import published_rows
from experiments.lib.harness import Experiment, Rows, grid, own_parser, page
from experiments.lib.saved_results import Results


if TYPE_CHECKING:
    from autoshard.program import Program
    from autoshard.validation.published_runs import Run


ROWS = (
    "recipe-v6e-llama3.1-8b-v6e-8",
    "recipe-v6e-llama3.1-8b-v6e-32",
    "maxtext-v4-22b-2x",
    "maxtext-v5e-16b-1x",
    "maxtext-v5e-32b-2x",
    "maxtext-v5e-64b-1x",
    "maxtext-v5p-32b-64c-2x",
    "maxtext-v5p-128b-128c-1x",
    "recipe-v6e-llama2-70b",
    "recipe-v6e-gpt3-175b-bf16",
)

VALUES = {
    "attn.q_proj": "query",
    "attn.k_proj": "key",
    "attn.v_proj": "value",
    "attn.o_proj": "out",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "context": "context",
    "input": "input",
}
"""Name of a layer's value in the decoder, by its name in a policy."""

BASES = {"none": "none", "dots": "minimal", "full": "full"}
"""MaxText's name of the treatment of unnamed values, by ours."""

POLICIES = 8
"""Number of MaxText's remat policies for training, each of which its estimator compiles with each batch.

These are full, minimal, minimal_with_context, minimal_offloaded, save_dot_except_mlp, save_dot_except_mlpwi,
save_qkv_proj and qkv_proj_offloaded.
"""

GIB = 2.0**30

SHARES = (1.0, 2.0, 0.5)
"""Candidate batches, as shares of the published batch."""

CANDIDATES = POLICIES * len(SHARES)


def processor_s() -> float:
    """Return the processor seconds of this process and of its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def program_of(run: "Run", remat: str, batch: int) -> "Program":
    """Make one step of the run's model with another remat, value by value, and batch."""
    from autoshard.program import SAVED, decoder_program
    from autoshard.program.remat_policy import read_policy

    policy = read_policy(remat)
    known = {path.rpartition(".")[2]: value for path, value in VALUES.items()}
    kept, away = ([known[name.rpartition(".")[2]] for name in names] for names in (policy.keep, policy.offload))
    base = BASES[policy.base]
    saved = None if base == "none" else [*SAVED[base], *(name for name in kept if name not in SAVED[base])]
    program = decoder_program(
        run.decoder,
        batch=batch,
        seq=run.seq,
        remat=base,
        saves=saved,
        offloads=away,
        attention="splash" if run.flash else "plain",
        blocks=run.blocks,
        optimizer=run.optimizer,
        compute_dtype=run.compute,
        weights=run.weights,
        moments=run.state,
        gradients=run.gradients,
        stack_axis=run.stack_axis,
    )
    gated = [name for name in VALUES if name != "mlp.gate_proj" or run.decoder.gated]
    return dataclasses.replace(program, savable=tuple(gated))


def searched(run: "Run") -> tuple[dict[str, Any], "Program", Any]:
    """Search the best recipe; return its row with the cost of the search, its program and its plan."""
    from autoshard.planning import Options, plan_recipes
    from autoshard.validation import stated_plan

    stated = stated_plan(run)[1].prediction
    batches = [round(run.batch * share) for share in SHARES]
    options = Options(topology=run.topology.name, mesh="auto", xla_flags=run.flags or None)
    began, used = time.monotonic(), processor_s()
    choices = {"batch": tuple(batches), "remat": tuple(BASES)}
    recipe, made = plan_recipes(lambda **chosen: program_of(run, **chosen), choices, options, of_source=True)
    spent, took = processor_s() - used, time.monotonic() - began
    prediction, chosen = made.plan.prediction, recipe.arguments
    tried = made.plan.provenance["recipe"]["tried"]
    row = {
        "published": {"remat": run.remat, "batch": run.batch, "step_s": stated.step_time_s},
        "found": {
            **chosen,
            "step_s": prediction.step_time_s,
            "mesh": dict(made.plan.mesh),
            "peak_bytes": prediction.peak_bytes,
        },
        "faster": stated.step_time_s / run.batch * chosen["batch"] / prediction.step_time_s,
        "tried": len(tried),
        "planned": sum(each["step_time_s"] is not None for each in tried),
        "search_s": took,
        "search_processor_s": spent,
    }
    return row, program_of(run, **chosen), made.plan


def judged(program: "Program", plan: Any, time_limit: float, whole: bool) -> dict[str, Any]:
    """Return the compiler's verdict and its processor time, with machine code if `whole`.

    The flag that libtpu refuses except on v5e is dropped.
    """
    from autoshard import UserError
    from autoshard.cost.compiler_flags import FUSED_GATHERS
    from autoshard.exec.ahead.ahead_process import compile_without_devices
    from autoshard.exec.ahead.compile_plans import report

    said = plan.provenance.get("xla_flags")
    if said is not None:
        kept = [flag for flag in said["flags"] if FUSED_GATHERS not in flag]
        plan = dataclasses.replace(plan, provenance={**plan.provenance, "xla_flags": {**said, "flags": kept}})
    used = processor_s()
    try:
        judgement = report(program, plan, compile_without_devices(program, plan, time_limit, not whole))
    except UserError as error:
        return {"failed": str(error)}
    verdict = {
        "fits": judgement.estimate is not None,
        "verdict": judgement.verdict.value,
        "compiled_bytes": judgement.peak_compiled,
    }
    return verdict | {"compile_processor_s" if whole else "quick_processor_s": processor_s() - used}


def table(rows: Rows) -> str:
    lines = []
    for name, row in rows.items():
        said, recipe = row["published"], row["found"]
        size = row.get("compiled_bytes")
        spent = row.get("compile_processor_s")
        lines.append(
            [
                name,
                f"{said['remat']}, {said['batch']}: {said['step_s']:.3g} s",
                f"{recipe['remat']}, {recipe['batch']}: {recipe['step_s']:.3g} s",
                ", ".join(f"{axis} {size}" for axis, size in recipe["mesh"].items()),
                f"{row['faster']:.3f}",
                f"{recipe['peak_bytes'] / GIB:.1f}, " + ("-" if size is None else f"{size / GIB:.1f}"),
                row.get("verdict")
                or {True: "yes", False: "no", None: row.get("failed", "not compiled")[:60]}[row.get("fits")],
                f"{row['planned']} of {row['tried']}",
                f"{row['search_processor_s']:.0f}",
                f"{spent * CANDIDATES / row['search_processor_s']:.0f}x" if spent and "fits" in row else "-",
            ]
        )
    faster = [row["faster"] for row in rows.values()]
    return page(
        "# Recipes found for published runs",
        f"""
`python experiments/quality/published_recipes.py`. Remat by value and the batch are searched with mesh and
sharding, under the run's own compiler flags; step times of both are predicted, the published one's as its
author states it. `faster`: predicted tokens a second over the published recipe's. `fits` is the compiler's
verdict, once it has every value in its place. `compile all`: processor time of compiling the found recipe
with machine code, times {CANDIDATES} candidates, over the search's, where that was done (for
recipes as they were found at the time).
""",
        grid(
            "run | published | found | mesh | faster | GiB: ours, compiled | fits | plans | search s | compile all",
            lines,
        ),
        f"Geometric mean of `faster`: {statistics.geometric_mean(faster):.3f}; least {min(faster):.3f}.",
    )


def main() -> int:
    parser = own_parser(time_limit=1200.0)
    parser.add_argument("--whole", action="store_true", help="compile with machine code, minutes of processor a row")
    parser.add_argument("--search", action="store_true", help="compile nothing")
    given = parser.parse_args()
    known = Results(given.out / "published_recipes.json").rows
    runs = {row["id"]: run for row, run in published_rows()}

    def work(name: str) -> dict[str, Any]:
        row, program, plan = searched(runs[name])
        if not given.whole:
            row |= {key: value for key, value in known.get(name, {}).items() if key == "compile_processor_s"}
        return row if given.search else row | judged(program, plan, given.time_limit, given.whole)

    return Experiment(script=__file__, names=ROWS, work=work, table=table).run(given)


if __name__ == "__main__":
    sys.exit(main())
