"""The first published runs of SPMD in PyTorch/XLA, compared with our plans for the same machines.

    python experiments/quality/published_spmd_runs.py [--only TEXT] [--again] [--table]

GPT-2 of 16 B parameters on v4-64 was published at 39 % of the chips' peak (pytorch.org/blog/pytorch-xla-spmd). The
script finds the best recipe of remat, mesh and sharding for some batches. It also predicts the plan by hand that such a
run would have: every layer recomputed, parameters split over all chips.

ResNet-50 on v4-8 is planned over batches with examples split alone, and with the height of images split over two and
over all chips. Steps are predicted; the TPU compiler gives its verdict and memory if it can. Results are saved by row
in `experiments/results/published_spmd_runs.json`, so that a broken run resumes.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.planning import Plan
    from autoshard.program import Program

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.lib.saved_results import Results, checked_out  # noqa: E402


RESULTS = Path(__file__).parents[1] / "results" / "published_spmd_runs.json"
TABLE = Path(__file__).parents[1] / "results" / "published_spmd_runs.md"
GPT_BATCHES = (64, 128, 256, 512)
IMAGE_BATCHES = (2, 32, 256, 1024, 2048)
LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "examples": ({"data": 4}, "data,-,-,-"),
    "height over 2": ({"data": 2, "space": 2}, "data,-,space,-"),
    "height over 4": ({"data": 1, "space": 4}, "-,-,space,-"),
}
"""Mesh, and spec of images [B, C, H, W], by name."""
COMPILE_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose key contains it")
    parser.add_argument("--again", action="store_true", help="also rows that are in the table")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    results = Results(RESULTS)
    keys = [f"gpt2-16b {batch}" for batch in GPT_BATCHES]
    keys += [f"resnet-50 {batch} {layout}" for batch in IMAGE_BATCHES for layout in LAYOUTS]
    for key in keys if not options.table else ():
        if options.only in key and (options.again or key not in results.rows):
            began = time.monotonic()
            row = language(int(key.split()[1])) if key.startswith("gpt2") else images(*key.split(" ", 2)[1:])
            results.keep(key, row | {"seconds": round(time.monotonic() - began, 1), "commit": checked_out()})
            print(key, results.rows[key], flush=True)
    TABLE.write_text(table(results.rows))


def language(batch: int) -> dict[str, Any]:
    """Return the best recipe of GPT-2, and the plan by hand."""
    from autoshard.planning import Options, make_plan, plan_recipes
    from autoshard.program import open_source

    def program_of(**chosen: Any) -> "Program":
        return open_source("hf:gpt2-16b", train=True, batch=batch, seq=1024, **chosen)

    options = Options(topology="v4-64", mesh="auto", time_limit=60)
    choices = {"remat": ("full", "dots", "none"), "attention": ("plain", "splash")}
    recipe, made = plan_recipes(program_of, choices, options, of_source=True)
    plan = made.plan
    by_hand = make_plan(program_of(remat="full"), Options(topology="v4-64", mesh={"data": 32}, time_limit=60))
    hand = by_hand.baseline_plans["fsdp"].prediction
    return {
        "recipe": recipe.arguments,
        "by hand": {"mfu": hand.mfu, "step_s": hand.step_time_s, "peak": hand.peak_bytes, "fits": hand.fits},
        **_found(plan),
        **_compiled(program_of(**recipe.arguments), plan),
    }


def images(batch: str, layout: str) -> dict[str, Any]:
    """Plan ResNet-50 with images split as in the layout."""
    from autoshard.errors import UserError
    from autoshard.planning import Options, make_plan, read_asked
    from autoshard.program import Role, open_source

    mesh, split = LAYOUTS[layout]
    rows = mesh["data"]
    if int(batch) % rows:
        return {"refused": f"{batch} images are no multiple of {rows}"}
    program = open_source("hf:resnet-50", train=True, batch=int(batch))
    (name,) = (each.name for each in program.arguments if each.role is Role.BATCH and len(each.shape) == 4)
    try:
        options = Options(topology="v4-8", mesh=mesh, time_limit=30, asked=read_asked({name: split}))
        plan = make_plan(program, options).plan
    except UserError as error:
        return {"refused": str(error)}
    return {**_found(plan), **_compiled(program, plan)}


def _found(plan: "Plan") -> dict[str, Any]:
    prediction = plan.prediction
    return {
        "mesh": plan.mesh,
        "step_s": prediction.step_time_s,
        "mfu": prediction.mfu,
        "peak": prediction.peak_bytes,
        "exposed_s": prediction.exposed_comm_s,
        "words": list(plan.words),
    }


def _compiled(program: "Program", plan: "Plan") -> dict[str, Any]:
    """Return the TPU compiler's verdict, without machine code."""
    from autoshard.errors import UserError
    from autoshard.exec.ahead.ahead_process import compile_without_devices
    from autoshard.exec.ahead.compile_plans import report

    try:
        judgement = report(program, plan, compile_without_devices(program, plan, COMPILE_S, True))
    except UserError as error:
        return {"verdict": str(error)}
    estimate = judgement.estimate
    return {
        "verdict": judgement.verdict.value,
        "compiled_peak": judgement.peak_compiled,
        "compiled_s": None if estimate is None else estimate.step_time_s,
    }


def table(rows: dict[str, Any]) -> str:
    """Return both tables in Markdown."""
    lines = [
        "# What the first published SPMD runs reached, and our plans",
        "",
        "`python experiments/quality/published_spmd_runs.py`. Steps are predicted; `compiled` is what the TPU",
        "compiler's schedule of the",
        "same plan takes by our rates, and its memory. No run was measured here.",
        "",
        "## GPT-2 with 16 B parameters on v4-64 (32 chips), 1024 tokens a sequence",
        "",
        "Published: 39 % of the peak; batch and recipe are not said there.",
        "",
        "| batch | by hand: FSDP, full remat | our recipe | mesh | step, compiled | MFU | GiB: ours, compiled | fits |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for batch in GPT_BATCHES:
        row = rows.get(f"gpt2-16b {batch}")
        if row is None:
            continue
        hand = row["by hand"]
        said = f"{hand['step_s']:.3g} s, {100 * hand['mfu']:.1f} %" + ("" if hand["fits"] else ", does not fit")
        chosen = ", ".join(f"{name} {value}" for name, value in row["recipe"].items())
        lines.append(_line(batch, said, chosen, _mesh(row), _times(row), f"{100 * row['mfu']:.1f} %", *_memory(row)))
    lines += [
        "",
        "## ResNet-50 on v4-8 (4 chips), images of 224 x 224",
        "",
        "Images come in so split; what follows is the plan's choice, which goes over to whole examples for each device",
        "where there are enough of them.",
        "",
        "| batch | images split by | step, compiled | images a second | waits | GiB: ours, compiled | fits |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for batch in IMAGE_BATCHES:
        for layout in LAYOUTS:
            row = rows.get(f"resnet-50 {batch} {layout}")
            if row is None:
                continue
            if "refused" in row:
                lines.append(_line(batch, layout, row["refused"].partition(" with these pins")[0], "", "", "", ""))
                continue
            rate, waits = batch / row["step_s"], f"{1e3 * row['exposed_s']:.2f} ms"
            lines.append(_line(batch, layout, _times(row), f"{rate:.0f}", waits, *_memory(row)))
    return "\n".join(lines) + "\n"


def _line(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _mesh(row: dict[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items())


def _times(row: dict[str, Any]) -> str:
    scheduled = row.get("compiled_s")
    return f"{row['step_s']:.3g} s, " + ("-" if scheduled is None else f"{scheduled:.3g} s")


def _memory(row: dict[str, Any]) -> tuple[str, str]:
    size = row.get("compiled_peak")
    return f"{row['peak'] / 2**30:.1f}, " + ("-" if size is None else f"{size / 2**30:.1f}"), row["verdict"]


if __name__ == "__main__":
    main()
