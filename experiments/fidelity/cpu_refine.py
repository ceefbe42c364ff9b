"""Predicted step times on 8 CPU devices before and after refining on other programs.

    python experiments/fidelity/cpu_refine.py

The script reads the plans that `cpu_order.py` ran: the bills and the measured times of their steps. It fits the figures
of the cost model to the steps of some programs, as `autoshard refine` does. The fitted figures then predict the steps
of the others. There are two kinds of splits: every family of programs is left out in turn, or two halves are each
predicted from the other. The fit uses only the few plans of a program that refine would run, those of least predicted
time. All plans of the predicted programs count. Nothing is run here.
"""

import dataclasses
import itertools as it
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence

from autoshard.cost import Bill, Calibration, Fit, Observation, fit, load_calibration
from experiments.fidelity.cpu_order import BILLS, TOPOLOGY
from experiments.lib.harness import RESULTS, grid, page
from experiments.lib.programs.cpu_programs import PROGRAMS


FEW = 4
"""Plans of a program that refine runs."""
MARK = 0.15


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A measured step of one plan."""

    row: str
    plan: str
    bill: Bill
    seconds: float

    @property
    def program(self) -> str:
        return self.row.partition(" | ")[0]

    @property
    def family(self) -> str:
        return PROGRAMS[self.program][0]

    def error(self, figures: Calibration) -> float:
        """Return the relative error of the predicted step time."""
        return abs(self.bill.seconds(figures) / self.seconds - 1.0)

    def observation(self) -> Observation:
        about = {"program": self.row, "plan": self.plan, "name": f"{self.row}: {self.plan}"}
        return Observation(TOPOLOGY, "", "measure", "step", about, self.bill, {"seconds": self.seconds})


def load() -> list[Step]:
    """Load every plan that was run and whose bill is saved."""
    if not BILLS.exists():
        raise SystemExit(f"{BILLS} is missing: run experiments/fidelity/cpu_order.py first.")
    rows, bills = json.loads((RESULTS / "cpu_order.json").read_text()), json.loads(BILLS.read_text())
    return [
        Step(row, name, Bill.from_json(bills[row][name]), plan["measured_s"][1])
        for row, measured in rows.items()
        for name, plan in measured["plans"].items()
        if name in bills.get(row, {}) and "measured_s" in plan
    ]


def few(steps: Sequence[Step], figures: Calibration) -> list[Step]:
    """Return the plans of every program that refine would run."""
    chosen: list[Step] = []
    for _, mine in it.groupby(sorted(steps, key=lambda s: s.row), key=lambda s: s.row):
        chosen += sorted(mine, key=lambda s: s.bill.seconds(figures))[:FEW]
    return chosen


def held_out(steps: Sequence[Step], apart: Mapping[str, int]) -> Iterable[tuple[list[Step], Fit]]:
    """Yield for every part its steps, and the figures fitted to a few plans of every program of the other parts."""
    shipped = load_calibration("cpu")
    for part in sorted(set(apart.values())):
        others = [step for step in steps if apart[step.row] != part]
        seen = [step.observation() for step in few(others, shipped)]
        yield [step for step in steps if apart[step.row] == part], fit(shipped, "cpu", seen)


def splits(steps: Sequence[Step]) -> dict[str, dict[str, int]]:
    """Map the name of a split to the part of each row."""
    rows = sorted({step.row for step in steps})
    families = sorted({step.family for step in steps})
    family_of = {step.row: families.index(step.family) for step in steps}
    return {
        "each family left out": family_of,
        "halves, by family": {row: family_of[row] % 2 for row in rows},
        "halves, by row": {row: number % 2 for number, row in enumerate(rows)},
    }


def table(steps: Sequence[Step]) -> str:
    """Return the results as a page of Markdown."""
    shipped = load_calibration("cpu")
    before = {step: step.error(shipped) for step in steps}
    after: dict[str, dict[Step, float]] = {}
    fitted: list[Fit] = []
    kinds, programs, figures = [], [], []
    for name, apart in splits(steps).items():
        after[name] = {}
        for mine, fit_of_part in held_out(steps, apart):
            after[name] |= {step: step.error(fit_of_part.calibration) for step in mine}
            fitted.append(fit_of_part)
        middles = (statistics.median(before.values()), statistics.median(after[name].values()))
        near = (sum(e <= MARK for e in errors.values()) / len(steps) for errors in (before, after[name]))
        kinds.append([name, *(f"{middle:.1%}" for middle in middles), *(f"{n:.0%}" for n in near)])
    first, errors = next(iter(after.items()))
    for row in dict.fromkeys(step.row for step in steps):
        mine = [step for step in steps if step.row == row]
        middles = [statistics.median(kind[step] for step in mine) for kind in (before, errors)]
        programs.append([row, len(mine), *(f"{middle:.1%}" for middle in middles)])
    for name in sorted({each.figure for fit_of_part in fitted for each in fit_of_part.figures}):
        values = [getattr(fit_of_part.calibration, name) for fit_of_part in fitted]
        figures.append([name, *(f"{value:.3g}" for value in (getattr(shipped, name), min(values), max(values)))])
    return page(
        "# Step times on 8 CPU devices, predicted before and after refining on other programs",
        f"`python experiments/fidelity/cpu_refine.py`, of the {len(steps)} plans that "
        "`experiments/fidelity/cpu_order.py` ran. Figures "
        f"are fitted to {FEW} plans of every program that is not predicted; errors are relative ones of step times.",
        grid("split | median error before | after | within 15 % before | after", kinds),
        f"By program, {first}:",
        grid("program | mesh | plans | median error before | after", programs),
        "Fitted figures, least and most over all splits:",
        grid("figure | shipped | least | most", figures),
    )


def main() -> None:
    text = table(load())
    (RESULTS / "cpu_refine.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
