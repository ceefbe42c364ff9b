"""Plan every bundled full-size model on 64 chips: wall time, memory of the planner, gaps, against the best baseline.

python experiments/bundled_models.py [NAME ...]
"""

import sys
from pathlib import Path

from plan_vs_baselines import run


OUT = Path(__file__).parent / "results" / "bundled_models.md"

TEXT = ("--batch", "64", "--seq", "4096", "--remat", "full")
SHORT = ("--batch", "256", "--seq", "512", "--remat", "full")
IMAGES = ("--batch", "1024")
ROWS = {
    "gpt2": ("--batch", "256", "--seq", "1024", "--remat", "full"),
    "gpt2-xl": ("--batch", "256", "--seq", "1024", "--remat", "full"),
    "gpt2-16b": ("--batch", "256", "--seq", "1024", "--remat", "full"),
    "llama3-8b": TEXT,
    "llama3-70b": TEXT,
    "llama3.1-405b": TEXT,
    "gemma2-9b": TEXT,
    "mixtral-8x7b": TEXT,
    "deepseek-v3": TEXT,
    "bert-large": SHORT,
    "t5-large": SHORT,
    "whisper-large": ("--batch", "256"),
    "vit-l16": IMAGES,
    "resnet-50": IMAGES,
}


def main() -> None:
    wanted = sys.argv[1:] or list(ROWS)
    lines = []
    for name in wanted:
        options = ["--train", *ROWS[name], "--topology", "v5p:4x4x4", "--mesh", "data=16,model=4"]
        found = run(name, options)
        if "error" in found:
            lines.append(f"| {name} | {found['wall']:.1f} | {found['rss'] / 2**30:.2f} | {found['error']} |")
        else:
            fitting = [b["step_time_s"] for b in found["baselines"].values() if b["fits"]]
            peak = found["peak_bytes"] / 2**30
            ratio = f"{min(fitting) / found['step_time_s']:.3f}" if fitting else "none fits"
            lines.append(
                f"| {name} | {found['wall']:.1f} | {found['rss'] / 2**30:.2f} | {found['wall_s']['solve']:.1f} "
                f"| {found['step_time_s'] * 1e3:.1f} | {ratio} | {found['mfu']:.1%} | {peak:.1f} "
                f"| {found['solver_gap']:.2%} | {found['plan_gap']:.2%} | {'; '.join(found['words'])} |"
            )
        print(lines[-1], flush=True)
    if not sys.argv[1:]:
        head = (
            "# Every bundled model, one training step on v5p:4x4x4 as data=16, model=4\n\n"
            "`python experiments/bundled_models.py`; `ratio` is the best fitting baseline's predicted time over ours.\n"
            "\n| model | wall s | planner GiB | of it solving s | step ms | ratio | MFU | peak GiB | solver gap "
            "| plan gap | plan |\n" + "| --- " * 11 + "|\n"
        )
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
