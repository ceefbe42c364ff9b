"""Default commands of well-known training setups against the flags that an expert gives: predicted steps, time, memory.

    python experiments/quality/default_commands.py [--only TEXT ...] [--again] [--table]

`default` states the model, the batch, the sequence and the chips, as a new user does. `expert` adds the mesh, the
recomputation and the kernel of the setup's source. Both are predicted by the planner, so that this compares choices,
not predictions. Rows are saved in `results/default_commands.json`; a row takes ten seconds to half an hour.
"""

import sys
from typing import Any

from experiments.lib.harness import Experiment, Rows, grid, page
from experiments.lib.plan_command import run


LIMIT_S = 900.0
"""Processor seconds for one plan."""
NEAR = 1.1
"""Most of the expert's step that a default step may take."""
LIMITS = (60.0, 4e9)
"""Wall seconds and bytes of all processes that a default command may take."""

TPU_RECIPES = "AI-Hypercomputer/tpu-recipes: training"
TITAN = "pytorch/torchtitan: benchmarks/llama3_h100_202412_torchtitan.md"
SPLASH, CUDNN = ("--attention", "splash"), ("--attention", "cudnn")
SETUPS: dict[str, tuple[str, str, int, int, tuple[str, ...], str]] = {
    # Model, chips, sequences in a step, tokens of a sequence, the expert's flags, their source.
    "llama3.1-8b on 256 v6e": (
        *("llama3.1-8b", "v6e:16x16", 1024, 8192),
        ("--mesh", "data=256", "--remat", "full,offload=input/q_proj/k_proj/v_proj/o_proj", *SPLASH),
        f"{TPU_RECIPES}/trillium/Llama3.1-8B-MaxText/v6e-256",
    ),
    "llama3.1-70b on 256 v6e": (
        *("llama3.1-70b", "v6e:16x16", 1280, 8192),
        ("--mesh", "data=256", "--remat", "full,offload=input/q_proj/k_proj/v_proj", *SPLASH),
        f"{TPU_RECIPES}/trillium/Llama3.1-70B-MaxText/v6e-256",
    ),
    "llama3.1-405b on 512 v5p": (
        *("llama3.1-405b", "v5p:8x8x8", 1024, 8192),
        ("--mesh", "data=512", "--remat", "full", *SPLASH),
        f"{TPU_RECIPES}/v5p/Llama3.1-405B-MaxText",
    ),
    "mixtral-8x7b on 256 v6e": (
        *("mixtral-8x7b", "v6e:16x16", 3072, 4096),
        ("--mesh", "data=256", "--remat", "full,offload=input/q_proj/k_proj/v_proj/o_proj", *SPLASH),
        f"{TPU_RECIPES}/trillium/Mixtral-8x7B-MaxText",
    ),
    "llama3.1-8b on 8 H100": (
        *("llama3.1-8b", "h100:8", 16, 8192),
        ("--mesh", "data=8", "--remat", "full:16+none", *CUDNN),
        f"{TITAN}: FSDP, every other layer recomputed",
    ),
    "llama3.1-8b on 128 H100": (
        *("llama3.1-8b", "h100:8*16", 256, 8192),
        ("--mesh", "data=128", "--remat", "full:16+none", *CUDNN),
        f"{TITAN}: FSDP, every other layer recomputed",
    ),
    "llama3.1-70b on 256 H100": (
        *("llama3.1-70b", "h100:8*32", 512, 8192),
        ("--mesh", "data=32,model=8", "--remat", "full", *CUDNN),
        f"{TITAN}: FSDP over 32, tensor parallelism over 8",
    ),
    "gpt2-xl on 16 v5e": (
        *("gpt2-xl", "v5e:4x4", 128, 1024),
        ("--mesh", "data=16", "--remat", "dots", "--attention", "auto"),
        "FSDP and the policy that JAX's guide to recomputation names first",
    ),
    "gemma2-9b on 64 v5e": (
        *("gemma2-9b", "v5e:8x8", 128, 4096),
        ("--mesh", "data=64", "--remat", "full", *SPLASH),
        "FSDP over all chips with full recomputation, as MaxText's defaults",
    ),
    "vit-l16 on 8 H100": (
        *("vit-l16", "h100:8", 1024, 0),
        ("--mesh", "data=8", "--remat", "none", "--attention", "auto"),
        "data parallelism, as timm's scripts",
    ),
}
WAYS = {f"{name}, {way}": (name, way) for name in SETUPS for way in ("default", "expert")}


def planned(key: str) -> dict[str, Any]:
    """Return the prediction of `autoshard plan` with nothing chosen, or with the expert's flags."""
    name, way = WAYS[key]
    config, topology, batch, seq, flags, _ = SETUPS[name]
    options = ["--train", "--batch", str(batch), *(("--seq", str(seq)) if seq else ()), "--topology", topology]
    answer = run(f"hf:{config}", [*options, *(flags if way == "expert" else ()), "--no-cache"], LIMIT_S)
    figures = {"cpu_s": answer["cpu"], "wall_s": answer["wall"], "planner_bytes": answer["pss"]}
    if "error" in answer:
        return figures | {"error": answer["error"]}
    figures |= {key: answer[key] for key in ("step_time_s", "peak_bytes", "mfu", "mesh")}
    return figures | {"recipe": (answer["recipe"] or {}).get("chosen")}


def table(rows: Rows) -> str:
    lines, near, within = [], 0, 0
    pairs = [name for name in SETUPS if f"{name}, default" in rows and f"{name}, expert" in rows]
    for name in pairs:
        default, expert = (rows[f"{name}, {way}"] for way in ("default", "expert"))
        took = default["wall_s"], default["planner_bytes"]
        within += all(spent <= most for spent, most in zip(took, LIMITS, strict=True))
        share = "-"
        if "error" not in default and "error" not in expert:
            ratio = default["step_time_s"] / expert["step_time_s"]
            near += ratio <= NEAR
            share = f"{ratio:.2f}"
        elif "error" not in default:
            near += 1
            share = "fits alone"
        lines.append([name, *map(_step, (default, expert)), share, *_chosen(default), f"{took[0]:.0f}"])
        lines[-1] += [f"{default['cpu_s']:.0f}", f"{took[1] / 1e9:.1f}"]
    return page(
        "# Default commands against an expert's flags",
        """
`python experiments/quality/default_commands.py`. The default command states model, chips, batch and sequence alone; the
expert's adds mesh, recomputation and attention of the source. Both steps are predicted. Seconds are those of the
default command on two cores that are shared.
""",
        f"The default's step is within 10 % of the expert's, or shorter, in {near} of {len(pairs)} setups; it is found "
        f"in {LIMITS[0]:.0f} s and {LIMITS[1] / 1e9:.0f} GB in {within}.",
        grid("setup | default: | expert: | ratio: | mesh | recipe | wall s: | CPU s: | GB:", lines),
        "Sources of the expert's flags:",
        [f"- {name}: `{' '.join(flags)}`; {source}" for name, (*_, flags, source) in SETUPS.items()],
    )


def _step(figures: dict[str, Any]) -> str:
    return f"{figures['step_time_s']:.4g} s" if "error" not in figures else "no plan"


def _chosen(figures: dict[str, Any]) -> list[str]:
    if "error" in figures:
        return [figures["error"][:120], "-"]
    mesh = ", ".join(f"{axis}={size}" for axis, size in figures["mesh"].items())
    return [mesh, ", ".join(f"{lever} {value}" for lever, value in (figures["recipe"] or {}).items()) or "plain"]


if __name__ == "__main__":
    sys.exit(Experiment(script=__file__, names=WAYS, work=planned, table=table).run())
