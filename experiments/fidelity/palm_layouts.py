"""Priced layouts of PaLM 540B's inference on 64 TPU v4, compared with those that its authors chose by measuring.

    python experiments/fidelity/palm_layouts.py [PLAN_PAIRS.json]

The script reads the measured steps of `palm-540b-inference-layouts` whose weights have 16 bits. Each step is rebuilt
with every layout of weights and of attention that Pope et al. (2022) name. Weights are stationary (`WS`), or gathered
over axes of the torus (`WG`). The solver chooses the remaining specs, and may gather weights that are split in two
dims. The script writes `results/palm_layouts.md`.
"""

import dataclasses
import sys
from pathlib import Path

from autoshard.planning.price.evaluate import evaluate
from autoshard.validation.pair_rows import read_groups
from autoshard.validation.published_runs import IncompleteError
from autoshard.validation.serving_rows import rebuild_serving


RESULTS = Path(__file__).parents[1] / "results"
LAYOUTS = ("WS 1D", "WS 2D", "WG X", "WG XY", "WG XYZ")
HEAD = """# Layouts of PaLM 540B's inference

`python experiments/fidelity/palm_layouts.py`: v4:4x4x4, weights of 16 bits, nothing fitted. Seconds of the whole
measured workload, GiB of one device's {limit:.1f}; **bold**: the layout that was measured (Pope et al. 2022, table 2).
A layout says where weights lie; what it leaves open is solved for, also whether they are gathered after all.

| workload | weights | attention by | priced s | GiB | fits | measured s | priced over measured |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> int:
    (group,) = read_groups(sys.argv[1] if len(sys.argv) > 1 else None, ["palm-540b"])
    lines, limit = [], 0.0
    for row in group.rows:
        run = row.serving
        if run is None:
            continue
        limit = run.topology.usable_bytes / 2**30
        for layout in LAYOUTS:
            for by_batch in (True, False):
                true = (layout, by_batch) == (run.layout, run.by_batch)
                cells = [f"{run.phase} of {run.batch} sequences", layout, "batch" if by_batch else "heads"]
                try:
                    price = evaluate(*rebuild_serving(dataclasses.replace(run, layout=layout, by_batch=by_batch)))
                except IncompleteError as error:
                    lines.append([*cells, "-", "-", str(error), "", ""])
                    continue
                seconds, size = price.step_time_s * run.steps, price.peak_bytes / 2**30
                cells += [f"{seconds:.4g}", f"{size:.1f}", "yes" if size <= limit else "no"]
                measured = row.step_s or 0.0
                cells += [f"{measured:.4g}", f"{seconds / measured:.2f}"] if true else ["", ""]
                lines.append([f"**{cell}**" if true and cell else cell for cell in cells])
    text = HEAD.format(limit=limit) + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    text += "".join(f"\nNot rebuilt: {row.plan}: {row.skipped}.\n" for row in group.rows if row.serving is None)
    (RESULTS / "palm_layouts.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
