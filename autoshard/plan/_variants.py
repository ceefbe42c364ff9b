"""One program in several variants (what is rematerialised): planned each, the best taken."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.errors import InfeasibleError
from autoshard.plan._make import PlanResult, make_plan
from autoshard.plan.model._options import Options
from autoshard.plan.record._plan import Plan
from autoshard.program import Program
from autoshard.units import format_seconds


FINENESS = 16
"""A mixture is looked for to within one part in so many of the layers."""

Mix = Callable[[str, int, str], tuple[str, Callable[[], Program]]]
"""From one variant, a number of layers and another: the name of what has the one in its first layers and the other in
the rest, and the program."""


REMATS = ("none", "dots", "full")
"""What may be computed again in the backward pass, what computes least first."""


def plan_remat(make: Callable[[str], Program], options: Options, **running: Any) -> PlanResult:
    """The plan of the program that computes as much again as is fastest within memory.

    `make` gives the program for a remat policy, or a mixture of two (`full:12+dots`: the first 12 layers, and the
    rest). `running` is what `make_plan` takes beside the options. Raises `InfeasibleError` if none fits.
    """

    def mixed(first: str, count: int, rest: str) -> tuple[str, Callable[[], Program]]:
        text = f"{first}:{count}+{rest}"
        return text, functools.partial(make, text)

    variants = {name: functools.partial(make, name) for name in REMATS}
    return plan_variants(variants, options, mix=mixed, **running)[1]


def plan_variants(
    variants: Mapping[str, Callable[[], Program]],
    options: Options,
    what: str = "remat",
    mix: Mix | None = None,
    **running: Any,
) -> tuple[str, PlanResult]:
    """The name and the plan of the variant with the least expected step that fits; `running` is for `make_plan`.

    Memory decides both what is computed again and how tensors are split, so every variant is planned with its own
    sharding. Of equal times the earlier variant is taken: name those that compute less first. With `mix` the best one
    is mixed with each that computes less and does not fit, on the mesh that the best one has: in as few layers as are
    still faster for it. The plan says in its words, and in its provenance under `what`, what the others came to; wall
    times are those of all of them.

    Raises the `InfeasibleError` of the last variant if none fits.
    """
    tried = _Tried(options, running)
    for name, make in variants.items():
        tried.plan(name, make)
    if tried.best is None:
        assert tried.refused is not None
        raise tried.refused
    if mix is not None:
        tried.mix(mix, list(variants))
    return tried.told(what)


class _Tried:
    """The variants planned so far."""

    def __init__(self, options: Options, running: Mapping[str, Any]) -> None:
        self.options, self.running = options, running
        self.best: tuple[str, PlanResult] | None = None
        self.layers: int | None = None
        self.said: dict[str, str] = {}
        self.wall: dict[str, float] = {}
        self.refused: InfeasibleError | None = None

    def plan(self, name: str, make: Callable[[], Program], **instead: Any) -> bool:
        """Whether it is the best so far."""
        program = make()
        self.layers = program.layers
        try:
            made = make_plan(program, dataclasses.replace(self.options, **instead), **self.running)
        except InfeasibleError as error:
            self.refused = error
            self.said[name] = "does not fit"
            return False
        for phase, seconds in made.wall_s.items():
            self.wall[phase] = self.wall.get(phase, 0.0) + seconds
        self.said[name] = format_seconds(made.plan.prediction.step_time_s)
        if self.best is None or made.plan.prediction.expected_s < self.best[1].plan.prediction.expected_s:
            self.best = name, made
        return self.best is not None and self.best[1] is made

    def mix(self, mix: Mix, names: list[str]) -> None:
        """Adds the mixtures of the best variant with those that compute less and do not fit.

        Fewer layers that compute again are faster until memory is so short that tensors must be split otherwise.
        """
        assert self.best is not None
        slow, made = self.best
        mesh, layers = dict(made.plan.mesh), self.layers
        if layers is None:
            return
        for fast in names[: names.index(slow)]:
            if self.said[fast] != "does not fit":
                continue
            least, most = 0, layers
            while most - least > max(1, layers // FINENESS):
                count = (least + most) // 2
                if self.plan(*mix(slow, count, fast), mesh=mesh):
                    most = count
                else:
                    least = count

    def told(self, what: str) -> tuple[str, PlanResult]:
        """The best one, which says what the others came to."""
        assert self.best is not None
        name, made = self.best
        others = ", ".join(f"{other} {text}" for other, text in self.said.items() if other != name)
        line = f"{what} {name}" + (f" (instead: {others})" if others else "")

        def told(plan: Plan) -> Plan:
            return dataclasses.replace(plan, words=(*plan.words, line), provenance=plan.provenance | {what: self.said})

        offered = tuple(dataclasses.replace(each, plan=told(each.plan)) for each in made.candidates)
        return name, dataclasses.replace(made, plan=told(made.plan), candidates=offered, wall_s=self.wall)
