"""Plan small programs, run them on 8 CPU devices, and compare: results with the unplanned run's, bytes with XLA's.

Results are loss, updated parameters and optimizer state; the state of SGD with momentum after one step is the
gradient itself, that of AdamW a tenth of it.

python experiments/cpu_fidelity.py [--optimizer momentum|adamw] [--baselines]
"""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np


HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=("momentum", "adamw"), default="momentum")
    parser.add_argument("--baselines", action="store_true", help="every baseline's plan too, not only ours")
    options = parser.parse_args()
    from autoshard.exec import ensure_devices, measure

    ensure_devices(8)
    from cpu_programs import MESHES, PROGRAMS

    from autoshard.plan import make_plan

    rows, ratios, worst = [], [], 0.0
    for name, make in PROGRAMS.items():
        for mesh in MESHES:
            program = make(options.optimizer)
            result = make_plan(program, topology="cpu:8", mesh=mesh)
            plans = {"ours": result.plan} | (result.baseline_plans if options.baselines else {})
            for label, plan in plans.items():
                found = measure(program, plan, steps=1, warmup=0, check=True)
                assert found.check is not None
                worst = max(worst, found.check.max_rel_diff)
                for axis in mesh:
                    predicted, compiled = found.wire_predicted.get(axis, 0), found.wire_compiled.get(axis, 0)
                    ratio = predicted / compiled if compiled else float("nan") if predicted else 1.0
                    ratios.append(ratio)
                    text = "x".join(str(n) for n in mesh.values())
                    rows.append(
                        f"| {name} | {text} | {label} | {axis} | {predicted / 1e6:.3f} | {compiled / 1e6:.3f} "
                        f"| {ratio:.2f} | {found.check.max_rel_diff:.1e} | {'yes' if found.check.passed else 'NO'} |"
                    )
                    print(rows[-1], flush=True)
    errors = [abs(r - 1.0) for r in ratios if np.isfinite(r)]
    summary = (
        f"{len(rows)} rows: median error of the bytes {statistics.median(errors):.1%}, 90th percentile "
        f"{float(np.percentile(errors, 90)):.1%}; largest difference of any result {worst:.1e} of its maximum."
    )
    command = "python experiments/cpu_fidelity.py " + " ".join(sys.argv[1:])
    head = (
        f"# Planned programs on 8 CPU devices, {options.optimizer}\n\n`{command.strip()}`\n\n{summary}\n\n"
        "| program | mesh | plan | axis | predicted MB | compiled MB | ratio | largest difference | equal |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    kind = f"{options.optimizer}{'_baselines' if options.baselines else ''}"
    (HERE / "results" / f"cpu_fidelity_{kind}.md").write_text(head + "\n".join(rows) + "\n")
    print(summary)


if __name__ == "__main__":
    main()
