"""The stages of a planned step: their chunks, the time outside of them, and the timetable."""

import dataclasses

from autoshard.base.units import format_bytes, format_seconds
from autoshard.cost import Schedule, Timetable, timetable


FORM_BY_STAGE = "torch-pipelining"
"""Export form of a plan with a program for each stage."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A run of layers that a stage computes in one piece. Sizes are bytes of one device."""

    forward_s: float
    """Seconds of one microbatch's forward pass."""
    backward_s: float | None
    """Seconds of one microbatch's backward pass, with recomputation; None if there is none."""
    modules: tuple[str, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Names of the first and last module of the chunk, for a cut between modules; empty for equal layers."""
    kept_bytes: int = dataclasses.field(default=0, metadata={"absent": 0})
    """Bytes that one microbatch saves for the backward pass."""
    fixed_bytes: int = dataclasses.field(default=0, metadata={"absent": 0})
    """Bytes of parameters, gradients and optimizer state, and of the largest op's operands and results."""
    hand_over_s: float = dataclasses.field(default=0.0, metadata={"absent": 0.0})
    """Seconds from the chunk's end to the beginning of the next chunk, for one microbatch."""
    handed_bytes: int = dataclasses.field(default=0, metadata={"absent": 0})
    """Bytes that one microbatch sends to later chunks."""
    update_s: float = dataclasses.field(default=0.0, metadata={"absent": 0.0})
    """Seconds of the work done once a step, after all microbatches: sums of gradients, and the optimizer."""
    weights_s: float = dataclasses.field(default=0.0, metadata={"absent": 0.0})
    """Part of `backward_s` that computes gradients of weights; 0 unless the schedule computes it apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """The pipeline in which a step computes its layers."""

    schedule: str
    """Name of the schedule as in the options: `gpipe`, `1f1b`, `interleaved:2` or `circular:2`."""
    stages: int
    """Number of stages: parts of the devices, each with its own layers."""
    microbatches: int
    """Number of microbatches in one step."""
    rounds: int
    """Number of chunks in each stage."""
    together: bool
    """True if the step is one SPMD program, in which all stages compute at once in every tick."""
    chunks: tuple[PlannedChunk, ...]
    """Chunks in the order of the layers: chunk c is on stage c % stages."""
    layers: int = dataclasses.field(default=0, metadata={"absent": 0})
    """Number of layers in all stages if the layers are equal, else 0."""
    before_s: float = 0.0
    """Seconds of the step before the first forward work."""
    between_s: float = 0.0
    """Seconds between the passes, for ops after the stages such as a head and a loss."""
    after_s: float = 0.0
    """Seconds of the step after the last backward work."""
    memory_bytes: tuple[int, ...] = dataclasses.field(default=(), metadata={"absent": ()})
    """Peak bytes of one device for each stage of a cut between modules; empty for equal layers."""
    bound_s: float = dataclasses.field(default=0.0, metadata={"absent": 0.0})
    """Lower bound in seconds of every cut between these modules, with this schedule, these microbatches and prices; 0
    if unknown.
    """

    def order(self) -> Schedule:
        """Return the `Schedule`: the name before the colon, stages, microbatches and rounds; in ticks if `together`."""
        return Schedule(
            self.schedule.partition(":")[0], self.stages, self.microbatches, self.rounds, in_ticks=self.together
        )

    def timetable(self) -> Timetable:
        """Return the timetable of the stages, in seconds from the first forward work.

        It includes `between_s` and the chunks' `hand_over_s`. It excludes `before_s`, `after_s` and the chunks'
        `update_s`. Without a backward pass it ends after the forward work.
        """
        backward = [0.0 if chunk.backward_s is None else chunk.backward_s for chunk in self.chunks]
        between = [chunk.hand_over_s for chunk in self.chunks[:-1]]
        forward = [chunk.forward_s for chunk in self.chunks]
        weights = [chunk.weights_s for chunk in self.chunks]
        return timetable(self.order(), forward, backward if self.trains else None, between, self.between_s, weights)

    @property
    def trains(self) -> bool:
        """True if there is a backward pass."""
        return any(chunk.backward_s is not None for chunk in self.chunks)

    def words(self) -> tuple[str, ...]:
        """Return the lines that a report prints above the picture of the stages.

        The first three lines name the schedule, the seconds with their bubble, and the seconds of a microbatch. A plan
        that trains adds a line on stored microbatches. A cut between modules adds a line for each stage, and one on
        the bound if it is known.
        """
        table = self.timetable()
        kind = "one SPMD program: all stages begin a tick together" if self.together else "a program for each stage"
        outside = self.before_s + self.between_s + self.after_s
        inside = format_seconds(table.step_time_s - self.between_s)
        bubble = f"{inside} in the stages, {self.bubble(table):.1%} of it bubble"
        outside_words = f"; {format_seconds(outside)} of the step outside of them" if outside else ""
        spent = [
            format_seconds(seconds)
            for seconds in sorted(chunk.forward_s + (chunk.backward_s or 0.0) for chunk in self.chunks)
        ]
        each = " to ".join(dict.fromkeys((spent[0], spent[-1])))
        both = ", forward and backward" if self.trains else ""
        lines = [
            f"{self.stages} stages, {self.order()}, {self.microbatches} microbatches ({kind})",
            bubble + outside_words,
            f"a microbatch takes {each} in a {'chunk' if self.rounds > 1 else 'stage'}{both}",
        ]
        if self.trains:
            live = table.in_flight
            many = f"{live[0]}" if min(live) == max(live) else f"{live[0]} (the first) to {live[-1]} (the last)"
            what = "ticks" if self.together else "microbatches" + (" and chunks" if self.rounds > 1 else "")
            lines.append(f"for the backward pass a stage holds the values of up to {many} {what}")
        lines.extend(self._stage_lines(table))
        return tuple(lines)

    def bubble(self, drawn: Timetable | None = None) -> float:
        """Return the share (0 to 1) of the stages' time in which they compute nothing that is used.

        The stages' time excludes `between_s`; 0 is returned if it is empty. `drawn` is the pipeline's timetable, built
        if None.
        """
        drawn = drawn or self.timetable()
        inside = drawn.step_time_s - self.between_s
        return 1 - sum(drawn.busy_s) / (self.stages * inside) if inside > 0 else 0.0

    def _stage_lines(self, drawn: Timetable) -> list[str]:
        """Return a line for each stage of a cut between modules, and one on the cut's bound if `bound_s` is known."""
        lines = []
        for stage, memory in enumerate(self.memory_bytes):
            own = self.chunks[stage :: self.stages]
            runs = ", ".join(" to ".join(dict.fromkeys(chunk.modules)) for chunk in own)
            forward, backward = (
                sum(times) for times in zip(*((c.forward_s, c.backward_s or 0.0) for c in own), strict=True)
            )
            times = f"{format_seconds(forward)} forward" + (
                f", {format_seconds(backward)} backward" if self.trains else ""
            )
            lines.append(f"stage {stage}: {runs}; {times}, {format_bytes(memory)} a device")
        if self.bound_s:
            step = drawn.step_time_s + self.after_s
            lines.append(
                "no cut between modules is faster by this schedule"
                if self.bound_s >= step * (1 - 1e-9)
                else f"no cut between modules is faster by more than {1 - self.bound_s / step:.1%} by this schedule"
            )
        return lines
