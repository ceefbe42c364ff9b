"""Matrix FLOPs of a compiled program, compared with those of the program that it was compiled from."""

import dataclasses

from autoshard.exec.hlo.schedule_estimate import Estimate
from autoshard.graph import read_graph
from autoshard.program import Program


TOLERANCE = 0.03
"""Share by which the counts may differ without a complaint, for small products that the compiler rewrites."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlopCheck:
    """Matrix FLOPs of one step over all devices."""

    program: float
    """FLOPs of the traced program, with the rematerialisation that it requests."""
    compiled: float
    """FLOPs of the compiled program on all devices."""
    remat: float
    """Compiled FLOPs that the compiler's own rematerialisation may have added."""
    model: float | None
    """FLOPs of the model alone, without recomputation and without masked scores."""
    padding: float = 1.0
    """FLOPs with the pads of dims that are split unevenly, over those without, as planned."""
    padded: str = ""
    """The dim with the most pads, in words; empty for none."""

    @property
    def ratio(self) -> float:
        """Compiled FLOPs over those of the traced program; 1 if that has none."""
        return self.compiled / self.program if self.program else 1.0

    @property
    def model_ratio(self) -> float | None:
        """Compiled FLOPs over those of the model; None if the model's are unknown or 0."""
        return self.compiled / self.model if self.model else None

    @property
    def complaint(self) -> str:
        """One sentence if the counts differ by more than `TOLERANCE` and, upwards, rematerialisation explain; else
        empty.

        Empty too for a traced program without matrix FLOPs.
        """
        low, high = (1.0 - TOLERANCE) * self.program, (1.0 + TOLERANCE) * self.program + self.remat
        if low <= self.compiled <= high or not self.program:
            return ""
        if self.compiled > high:
            explained = f" ({self.remat / self.program:.0%} may be the compiler's recompute)" if self.remat else ""
            others = "several devices do the same work, or a loop runs less often than was read"
            padding_explains = self.compiled <= high + (self.padding - 1.0) * self.program
            why = self.padded if self.padded and padding_explains else " and ".join(filter(None, (self.padded, others)))
        else:
            explained = ""
            why = "a loop runs more often than was read, or a kernel's flops are not known; the estimate is too short"
        return f"the compiled program does {self.ratio:.2f} x the matrix flops of the traced one{explained}: {why}"


def check_flops(
    program: Program, estimate: Estimate, devices: int, padding: float = 1.0, padded: str = ""
) -> FlopCheck:
    """Compare the matrix FLOPs of a compiled step on `devices` devices with those of the traced program.

    `estimate` has the FLOPs of one device; `padding` and `padded` are the fields of `FlopCheck`.
    """
    return FlopCheck(
        program=float(read_graph(program.module).flops),
        compiled=estimate.flops * devices,
        remat=estimate.remat_flops * devices,
        model=program.model_flops,
        padding=padding,
        padded=padded,
    )
