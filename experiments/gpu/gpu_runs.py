"""Figures of eager frameworks on H100, fitted to all but one part of the training rows, which is then predicted.

    python experiments/gpu/gpu_runs.py RUNS.json

RUNS.json has llm-foundry's rows (`autoshard validate --pairs RUNS.json`). The fitted figures are the share of peak of
large matmuls, that of the attention kernel, and the cost of a gather that overlaps compute. Other figures are shipped
ones.
"""

import dataclasses
import pathlib
import statistics
import sys
from unittest import mock

import numpy as np
from scipy.optimize import least_squares

from autoshard.cost import Compute, load_calibration
from autoshard.degrees import gpu_stage
from autoshard.degrees.gpu_stage import host_figures
from autoshard.degrees.gpu_step import price_step
from autoshard.validation.gpu_rows import GpuRow, read_gpu_rows


def errors(rows: list[GpuRow], figures: np.ndarray) -> np.ndarray:
    """Return logarithms of predicted over measured seconds."""
    matmul, attention, contention = figures
    calibration = dataclasses.replace(load_calibration("h100"), matmul_efficiency=matmul)
    shipped = host_figures()
    kernels = shipped.attention_efficiency | {"triton": {"h100": attention}}
    mine = dataclasses.replace(shipped, attention_efficiency=kernels, contention=contention)
    with mock.patch.object(gpu_stage, "Compute", lambda topology: Compute(topology, calibration)):
        return np.log(
            [price_step(row.run, mine).seconds / row.measured_s for row in rows if row.run and row.measured_s]
        )


def fitted(rows: list[GpuRow]) -> np.ndarray:
    """Fit the three figures to rows."""
    start = [0.7, 0.2, 0.4]
    solution = least_squares(
        lambda x: errors(rows, x), start, loss="soft_l1", f_scale=0.05, diff_step=0.02, max_nfev=12
    )
    return solution.x


def main() -> None:
    """Print a line for each part that is left out."""
    rows = [row for row in read_gpu_rows(pathlib.Path(sys.argv[1])) if row.run and row.table.endswith("h100_80gb")]
    for part in sorted({row.source for row in rows}):
        rest, out = [r for r in rows if r.source != part], [r for r in rows if r.source == part]
        figures = fitted(rest)
        off = np.abs(np.expm1(errors(out, figures)))
        print(
            f"without {part}: {len(out)} rows {100 * statistics.median(off):.1f} % off in the median, "
            f"{100 * np.quantile(off, 0.9):.1f} % at the 90th percentile; figures {np.round(figures, 3).tolist()}"
        )


if __name__ == "__main__":
    main()
