"""Plan full-size decoders and set the plan's predicted step time beside the best baseline that fits.

python experiments/plan_vs_baselines.py [NAME ...]
"""

import json
import subprocess
import sys
import time
from pathlib import Path


HERE = Path(__file__).parent
OUT = HERE / "results" / "plan_vs_baselines.md"

ROWS = [
    # name, mode, batch, sequence, remat, topology, mesh
    ("gpt2-xl", "train", 256, 1024, "dots", "v5e:8x8", "data=16,model=4"),
    ("gpt2-xl", "infer", 64, 1024, "none", "v5e:4x4", "data=4,model=4"),
    ("llama3-8b", "train", 64, 8192, "full", "v5p:4x8x8", "data=32,model=8"),
    ("llama3-8b", "train", 64, 8192, "full", "v5p:4x4x4", "data=64"),
    ("llama3-8b", "infer", 64, 8192, "none", "v5e:8x8", "data=16,model=4"),
    ("llama3-70b", "train", 256, 8192, "full", "v5p:8x8x8", "data=64,model=8"),
    ("llama3-70b", "infer", 64, 8192, "none", "v6e:8x8", "data=8,model=8"),
]


def run(name: str, options: list[str]) -> dict:
    """`autoshard plan hf:NAME OPTIONS --json` in a process of its own; with its wall and CPU seconds and peak bytes."""
    command = [sys.executable, "-m", "autoshard", "plan", f"hf:{name}", *options, "--json", "--quiet"]
    # The largest resident size of this one process, in KiB, from a parent of its own.
    code = (
        "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:]); "
        "u = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(u.ru_maxrss, u.ru_utime + u.ru_stime, file=sys.stderr); sys.exit(r.returncode)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    *said, used = done.stderr.strip().splitlines()
    kib, cpu = used.split()
    seen = {"wall": time.monotonic() - start, "cpu": float(cpu), "rss": int(kib) * 1024}
    return seen | (json.loads(done.stdout) if done.returncode == 0 else {"error": said[-1] if said else "failed"})


def main() -> None:
    wanted = set(sys.argv[1:])
    lines = []
    for row in ROWS:
        if wanted and row[0] not in wanted:
            continue
        name, mode, batch, seq, remat, topology, mesh = row
        options = [f"--{mode}", "--batch", str(batch), "--seq", str(seq), "--topology", topology, "--mesh", mesh]
        found = run(name, options + (["--remat", remat] if mode == "train" else []))
        if "error" in found:
            lines.append(f"| {name} | {mode} | {topology} | {mesh} | {found['error']} |")
        else:
            fitting = {k: b["step_time_s"] for k, b in found["baselines"].items() if b["fits"]}
            best = min(fitting, key=lambda k: fitting[k], default="none fits")
            ratio = f"{fitting[best] / found['step_time_s']:.3f}" if fitting else "-"
            shown = f"{fitting[best] * 1e3:.1f}" if fitting else "-"
            lines.append(
                f"| {name} | {mode} {batch}x{seq} {remat} | {topology} | {mesh} | {found['step_time_s'] * 1e3:.1f} "
                f"| {best} | {shown} | {ratio} | {found['mfu']:.1%} | {found['peak_bytes'] / 2**30:.1f} "
                f"| {found['solver_gap']:.2%} | {found['plan_gap']:.2%} | {found['wall']:.1f} "
                f"| {found['rss'] / 2**30:.2f} | {'; '.join(found['words'])} |"
            )
        print(lines[-1], flush=True)
    head = (
        "# The plan against the best baseline that fits, predicted\n\n"
        "`python experiments/plan_vs_baselines.py`\n\n"
        "| model | step | topology | mesh | plan ms | best baseline | its ms | ratio | MFU | peak GiB | solver gap "
        "| plan gap | wall s | planner GiB | plan |\n" + "| --- " * 15 + "|\n"
    )
    if not wanted:
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
