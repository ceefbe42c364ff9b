"""The first published runs of SPMD in PyTorch/XLA, compared with our plans for the same machines.

    python experiments/quality/published_spmd_runs.py [--only TEXT ...] [--again] [--table]

GPT-2 of 16 B parameters on v4-64 was published at 39 % of the chips' peak (pytorch.org/blog/pytorch-xla-spmd). The
script finds the best recipe of remat, mesh and sharding for some batches. It also predicts the plan by hand that such a
run would have: every layer recomputed, parameters split over all chips.

ResNet-50 on v4-8 is planned over batches with examples split alone, and with the height of images split over two and
over all chips. Steps are predicted; the TPU compiler gives its verdict and memory if it can. Results are saved by row
in `experiments/results/published_spmd_runs.json`, so that a broken run resumes.
"""

import sys
from typing import TYPE_CHECKING, Any

from experiments.lib.harness import Experiment, Rows, grid, page, plain


if TYPE_CHECKING:
    from autoshard.planning import Plan
    from autoshard.program import Program


GPT_BATCHES = (64, 128, 256, 512)
IMAGE_BATCHES = (2, 32, 256, 1024, 2048)
LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "examples": ({"data": 4}, "data,-,-,-"),
    "height over 2": ({"data": 2, "space": 2}, "data,-,space,-"),
    "height over 4": ({"data": 1, "space": 4}, "-,-,space,-"),
}
"""Mesh, and spec of images [B, C, H, W], by name."""
COMPILE_S = 600.0


def work(name: str) -> dict[str, Any]:
    """Compute one row of either table."""
    model, batch, *layout = name.split(" ", 2)
    return language(int(batch)) if model == "gpt2-16b" else images(int(batch), *layout)


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


def images(batch: int, layout: str) -> dict[str, Any]:
    """Plan ResNet-50 with images split as in the layout."""
    from autoshard.errors import UserError
    from autoshard.planning import Options, make_plan, read_asked
    from autoshard.program import Role, open_source

    mesh, split = LAYOUTS[layout]
    rows = mesh["data"]
    if batch % rows:
        return {"refused": f"{batch} images are no multiple of {rows}"}
    program = open_source("hf:resnet-50", train=True, batch=batch)
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


def table(rows: Rows) -> str:
    """Return both tables in Markdown."""
    decoders, networks = [], []
    for name, row in rows.items():
        model, batch, *layout = name.split(" ", 2)
        if model == "gpt2-16b":
            hand = row["by hand"]
            said = f"{hand['step_s']:.3g} s, {100 * hand['mfu']:.1f} %" + ("" if hand["fits"] else ", does not fit")
            recipe = ", ".join(f"{name} {value}" for name, value in row["recipe"].items())
            mesh = ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
            cells = (batch, said, recipe, mesh, _times(row), f"{100 * row['mfu']:.1f} %", *_memory(row))
            decoders.append(map(plain, cells))
        elif "refused" in row:
            refused = row["refused"].partition(" with these pins")[0]
            networks.append(map(plain, (batch, *layout, refused, "", "", "", "")))
        else:
            rate, waits = int(batch) / row["step_s"], f"{1e3 * row['exposed_s']:.2f} ms"
            networks.append(map(plain, (batch, *layout, _times(row), f"{rate:.0f}", waits, *_memory(row))))
    return page(
        "# What the first published SPMD runs reached, and our plans",
        """
`python experiments/quality/published_spmd_runs.py`. Steps are predicted; `compiled` is what the TPU
compiler's schedule of the
same plan takes by our rates, and its memory. No run was measured here.
""",
        "## GPT-2 with 16 B parameters on v4-64 (32 chips), 1024 tokens a sequence",
        "Published: 39 % of the peak; batch and recipe are not said there.",
        grid(
            "batch | by hand: FSDP, full remat | our recipe | mesh | step, compiled | MFU | GiB: ours, compiled | fits",
            decoders,
        ),
        "## ResNet-50 on v4-8 (4 chips), images of 224 x 224",
        """
Images come in so split; what follows is the plan's choice, which goes over to whole examples for each device
where there are enough of them.
""",
        grid(
            "batch | images split by | step, compiled | images a second | waits | GiB: ours, compiled | fits", networks
        ),
    )


def _times(row: dict[str, Any]) -> str:
    scheduled = row.get("compiled_s")
    return f"{row['step_s']:.3g} s, " + ("-" if scheduled is None else f"{scheduled:.3g} s")


def _memory(row: dict[str, Any]) -> tuple[str, str]:
    size = row.get("compiled_peak")
    return f"{row['peak'] / 2**30:.1f}, " + ("-" if size is None else f"{size / 2**30:.1f}"), row["verdict"]


def main() -> int:
    names = [f"gpt2-16b {batch}" for batch in GPT_BATCHES]
    names += [f"resnet-50 {batch} {layout}" for batch in IMAGE_BATCHES for layout in LAYOUTS]
    return Experiment(script=__file__, names=names, work=work, table=table).run()


if __name__ == "__main__":
    sys.exit(main())
