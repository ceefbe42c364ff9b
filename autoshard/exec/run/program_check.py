"""Check of a program: its trace against eager torch, and its planned step against the unplanned one."""

import dataclasses
from collections.abc import Mapping

from autoshard.exec.run.eager_check import EagerCheck, check_eager
from autoshard.exec.run.measurement import measure
from autoshard.exec.run.result_check import Check
from autoshard.planning import Plan
from autoshard.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramCheck:
    """Results of the comparisons of one program."""

    eager: EagerCheck
    """Comparison of the traced step with eager torch, or the reason why there is none."""
    plan: Check | None = None
    """Comparison of the planned step with the unplanned one; None without a plan or with a `plan_skipped`."""
    plan_skipped: str = ""
    """Reason why the planned step was not compared; else empty."""
    edges: Mapping[str, Check | None] = dataclasses.field(default_factory=dict)
    """Comparisons like `plan`, by name of the edge case of the arguments; None for one that was skipped."""

    @property
    def agrees(self) -> bool:
        """True if none of the comparisons shows a difference; skipped ones count as equal."""
        checks = (self.plan, *self.edges.values())
        return self.eager.agrees and all(check is None or check.passed for check in checks)

    def __str__(self) -> str:
        """Return a line for each comparison, with its largest difference or the reason why it was skipped; edge cases
        only if they differ.
        """
        worst = self.eager.worst
        lines = [self.eager.skipped]
        if worst is not None:
            verb = "agrees with" if self.eager.agrees else "differs from"
            name = f"{worst.kind} {worst.name}"
            lines = [f"The traced step {verb} eager torch: the largest difference is {worst.rel_diff:.1e} ({name})."]
        if self.plan is not None:
            verb = "agrees with" if self.plan.passed else "differs from"
            size = f"{self.plan.max_rel_diff:.1e}"
            lines.append(f"The planned step {verb} the unplanned one: the largest difference is {size}.")
        for name, edge in self.edges.items():
            if edge is not None and not edge.passed:
                lines.append(f"With {name} among its arguments it differs by {edge.max_rel_diff:.1e}.")
        return "\n".join(line for line in (*lines, self.plan_skipped) if line)


def check(program: Program, plan: Plan | None = None, seed: int = 0) -> ProgramCheck:
    """Compare the traced step with eager torch; with a plan, also one planned step with the unplanned one.

    The planned step runs on the devices present, also from edge-case arguments. `seed` draws inputs and example
    arguments.

    Raises `UserError` if the plan needs more devices than are present, is for another program, or does not run.
    """
    eager = check_eager(program, seed)
    if plan is None:
        return ProgramCheck(eager)
    result = measure(program, plan, steps=1, warmup=0, check=True, seed=seed, eager=False)
    return ProgramCheck(eager, result.check, result.check_skipped, result.edges)
