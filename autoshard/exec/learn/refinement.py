"""Refinement loop: plan, judge the best plans, fit the cost figures, and plan again until the choice is stable.

Each round plans with the fitted figures and lets a judge time a few of the best plans that really differ. It stores
each judgement in the user's database at once, and fits the figures to all of them. A repeated or resumed run finds its
own judgements in the database. It plans its first round with other programs' and judges' observations only.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from autoshard.base.units import format_seconds
from autoshard.cost import (
    STEP,
    Bill,
    Database,
    Fit,
    Judge,
    Observation,
    Topology,
    chosen_flags,
    compiler_version,
    fit_observations,
)
from autoshard.errors import UserError
from autoshard.exec.learn.judges import Judging, Seen, judge_of
from autoshard.planning import (
    Options,
    Plan,
    PlanOptions,
    PlanResult,
    check_request,
    make_plan,
    plan_bills,
    plan_digest,
    read_options,
    settled_options,
)
from autoshard.program import Program, lift_constraints, open_source


PLANS, ROUNDS = 4, 3
"""Default number of plans judged in one round, and default number of rounds at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """Plan with its judgement."""

    name: str
    """Name of the plan's `PlanCandidate`, with the round appended if two plans would share a name."""
    why: str
    """Explanation of how the search found this plan."""
    plan: Plan
    seen: Seen
    """Latest judgement of this plan."""
    round: int
    """Number of the round, from 1, that first offered the plan."""
    kept: bool
    """True if the judgement was in the database already."""
    predicted_before_s: float
    """Seconds of a step, predicted with the figures of the first round."""
    predicted_after_s: float
    """Seconds of a step, predicted with the figures fitted to all judgements."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refinement:
    """Result of a refinement: the best plan, all judgements and the fitted figures."""

    plan: Plan
    """The fitting plan with the least judged time; its provenance has the details under `refined`."""
    best: Judged
    """Judgement of `plan`, the best plan."""
    judged: tuple[Judged, ...]
    """All judged plans, the best first; plans that do not fit and failed plans are last."""
    judge: Judge
    """Name of the judge of the plans."""
    rounds: int
    """Number of rounds that ran."""
    settled: bool
    """True if the choice became stable before the rounds ran out."""
    why: str
    """Reason for the end of the loop, as a clause."""
    fit: Fit
    """Cost figures after the last round, with their uncertainty."""
    stored: str = ""
    """Path of the file with the observations, which later plans use; empty if they are not stored."""


def refine(
    program: Program | str,
    *,
    topology: str,
    judge: Judge | None = None,
    plans: int = PLANS,
    rounds: int = ROUNDS,
    steps: int = 10,
    compile_limit: float = 600.0,
    executor: concurrent.futures.Executor | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Unpack[PlanOptions],
) -> Refinement:
    """Plan `program` on `topology`, judge the best plans, fit the cost figures, and repeat until the choice is stable.

    - `program`: traced program, or the text of its source (`hf:CONFIG`).
    - `judge`: `"measure"` times plans on the devices present (the default for CPU topologies); `"compile"` uses the
      compiler of TPUs or GPUs without devices.
    - `plans`: plans judged in one round; they really differ.
    - `rounds`: most rounds.
    - `steps`: timed steps of each plan, for `"measure"`.
    - `compile_limit`: most seconds of compiling one plan.
    - `executor`: runs compilations as its tasks, as in `compile_plans`.
    - `progress`: receives lines of progress; None discards them.
    - `options`: options of `autoshard.plan`.

    Judgements are stored in the user's database, and later plans of the topology use them. `calibration=False` neither
    reads nor writes the database. Judgements of steps with compiler flags (`xla_flags`) serve only plans with the same
    flags.

    A plan on which the judge fails is dropped, with the reason. Raises `UserError` if the judge fails on all plans, or
    if none fits. Raises it also for the option `form`, for fewer than 1 plan or round, or as `autoshard.plan` does.
    """
    if plans < 1 or rounds < 1:
        raise UserError(f"refine: {plans} plans in {rounds} rounds; at least 1 plan and 1 round are needed.")
    if options.get("form") is not None:
        raise UserError("refine: plans within a form are not judged; leave `form` out.")
    parsed = Topology.parse(topology)
    read = read_options(topology, options)
    check_request(read)
    judging = judge_of(judge, parsed, steps, compile_limit, executor)
    if judging.name == "measure":
        from autoshard.exec.devices.local_devices import ensure_devices

        ensure_devices(parsed.num_devices)
    program = open_source(program, **settled_options({}, topology)) if isinstance(program, str) else program
    if read.ignore_constraints:  # lifted here, so that the judge runs the program that is planned
        program, read = lift_constraints(program), dataclasses.replace(read, ignore_constraints=False)
    flags, _ = chosen_flags(read.xla_flags, parsed.chip)
    database = Database.of_user() if read.calibration else None
    memory = _Memory(parsed, flags, judging.name, program.fingerprint, database)
    planning = dataclasses.replace(read, candidates=plans)
    return _Refiner(program, planning, judging, memory, progress or (lambda line: None)).run(rounds)


class _Memory:
    """Observations in the database and of this run; a run without a database uses its own only."""

    def __init__(
        self, topology: Topology, flags: Sequence[str], judge: Judge, program: str, database: Database | None
    ) -> None:
        self.topology, self.flags, self.program, self.database = topology, flags, program, database
        self.judge: Judge = judge
        self.compiler = compiler_version(topology, flags)
        """Version of the compiler, with the flags."""
        self.mine: list[Observation] = []
        """Observations of this run."""
        self.stored = "" if database is None else str(database.path)
        """Path of the database; empty without one, and if it could not be written."""

    def all(self) -> list[Observation]:
        """Return every observation of this topology and compiler, stored ones first, without duplicates."""
        stored = self.database.read(self.topology.name, self.compiler) if self.database is not None else []
        return list({each.id: each for each in (*stored, *self.mine)}.values())

    def of_others(self) -> list[Observation]:
        """Return the observations without this judge's own of this program, as before the first run."""
        own_pair = (self.judge, self.program)
        return [each for each in self.all() if (each.judge, each.about.get("program")) != own_pair]

    def fit(self, observations: Sequence[Observation]) -> Fit:
        """Fit the cost figures to observations; without any they are the shipped ones."""
        return fit_observations(self.topology, observations, self.flags)

    def judgements(self) -> dict[str, Seen]:
        """Return this judge's earlier judgements of this program by plan digest; duplicates resolve to the least id."""
        by_digest: dict[str, Seen] = {}
        for each in sorted(self.all(), key=lambda o: o.id):
            if each.op == STEP and (each.judge, each.about.get("program")) == (self.judge, self.program):
                by_digest.setdefault(each.about["plan"], Seen(**each.seen))
        return by_digest

    def keep(self, plan: Plan, name: str, bill: Bill, seen: Seen) -> None:
        """Store a judgement, also in the database if there is one."""
        about = {"program": self.program, "plan": plan_digest(plan), "name": f"{plan.program_name}: {name}"}
        observation = Observation(self.topology.name, self.compiler, self.judge, STEP, about, bill, seen.to_json())
        self.mine.append(observation)
        if self.database is not None and not self.database.add([observation]):
            self.stored = ""


@dataclasses.dataclass(slots=True)
class _Case:
    """Candidate plan and, once it is judged, its judgement."""

    name: str
    """Unique name among the cases."""
    why: str
    """Explanation of how the search found the plan."""
    plan: Plan
    bill: Bill
    """Itemised work of the plan's step, which any figures can price."""
    round: int
    """Number of the round, from 1, that first offered it."""
    seen: Seen | None = None
    """Judgement; None before it is judged."""
    kept: bool = False
    """True if the judgement was in the database already."""


class _Refiner:
    """State of one refinement.

    - `planning`: options of the planner, with the number of plans in a round as `candidates`.
    - `judging`, `memory`: judge, and observations.
    - `progress`: receives lines of progress.
    """

    def __init__(
        self,
        program: Program,
        planning: Options,
        judging: Judging,
        memory: _Memory,
        progress: Callable[[str], None],
    ) -> None:
        self.program, self.planning = program, planning
        self.judging, self.memory, self.progress = judging, memory, progress
        self.cases: dict[str, _Case] = {}
        """Digest of a plan -> its case."""

    def run(self, rounds: int) -> Refinement:
        """Run up to `rounds` rounds and end early when the choice is stable.

        It is stable if the planner's choice is also judged best, or if two successive rounds choose the same plan. The
        first round plans without this judge's own observations of the program.
        """
        first = fit = self.memory.fit(self.memory.of_others())
        earlier: str | None = None
        settled, why, number = False, "", 0
        for number in range(1, rounds + 1):
            self.progress(f"Round {number}: planning with {_known(fit)}")
            planned = make_plan(self.program, dataclasses.replace(self.planning, calibration=fit))
            choice = plan_digest(planned.plan)
            self.judge(self.offered(planned, number), number)
            fit = self.memory.fit(self.memory.all())
            best = self.best()
            # The choice is stable if the planner's first choice is also the judge's, or if the new figures choose the
            # same plan again.
            if best == choice:
                settled, why = True, "the plan that was chosen is the one that was judged best"
            elif choice == earlier:
                settled, why = True, "the same plan was chosen again"
            if settled:
                break
            earlier = choice
        else:
            why = f"{rounds} {'round is' if rounds == 1 else 'rounds are'} over, and the choice still changes"
        return self.result(first, fit, number, settled, why)

    def offered(self, made: PlanResult, number: int) -> list[_Case]:
        """Return the cases to judge in round `number`: our candidates, then the fastest baselines that fit.

        There are no duplicates and at most as many as `candidates` of the options. New plans are added to `cases`;
        earlier ones are returned with their judgements.
        """
        by_digest: dict[str, tuple[str, str, Plan]] = {}
        for each in made.candidates:
            by_digest.setdefault(plan_digest(each.plan), (each.name, each.why, each.plan))
        baselines = made.plan.baselines
        for name in sorted(baselines, key=lambda name: (baselines[name].step_time_s, name)):
            if len(by_digest) >= self.planning.candidates:
                break
            if baselines[name].fits:
                plan = made.baseline_plans[name]
                by_digest.setdefault(plan_digest(plan), (f"{name}*", "baseline, completed by the solver", plan))
        chosen = dict(list(by_digest.items())[: self.planning.candidates])
        new = {digest: each for digest, each in chosen.items() if digest not in self.cases}
        bills = plan_bills(self.program, [plan for _, _, plan in new.values()])
        for (digest, (name, why, plan)), bill in zip(new.items(), bills, strict=True):
            names = {case.name for case in self.cases.values()}
            label = f"{name}, round {number}" if name in names else name
            self.cases[digest] = _Case(label, why, plan, bill, number)
        return [self.cases[digest] for digest in chosen]

    def judge(self, cases: Iterable[_Case], number: int) -> None:
        """Judge the cases that have no judgement yet, in place; reuse stored judgements, and store new ones unless they
        failed.
        """
        earlier = self.memory.judgements()
        unjudged: dict[str, _Case] = {}
        for case in cases:
            if case.seen is not None:
                continue
            case.seen = earlier.get(plan_digest(case.plan))
            case.kept = case.seen is not None
            if case.seen is None:
                unjudged[case.name] = case
            else:
                self.progress(f"Round {number}: {_line(case)} (judged before)")
        plans = {name: case.plan for name, case in unjudged.items()}
        for name, seen in self.judging.judge(self.program, plans, self.progress):
            case = unjudged[name]
            case.seen = seen
            if not seen.failed:
                self.memory.keep(case.plan, name, case.bill, seen)
            self.progress(f"Round {number}: {_line(case)}")

    def best(self) -> str:
        """Return the digest of the fitting plan with the least judged time; of equal times, the least digest.

        Raises `UserError` if no plan fits or has a time.
        """
        judged = {digest: case.seen for digest, case in self.cases.items() if case.seen is not None}
        times = {d: seen.seconds for d, seen in judged.items() if seen.fits and seen.seconds is not None}
        if times:
            return min(times, key=lambda digest: (times[digest], digest))
        failed = [f"{case.name}: {case.seen.failed}" for case in self.cases.values() if case.seen and case.seen.failed]
        if len(failed) == len(judged):
            raise UserError(f"the judge {self.judging.name} failed on every plan; {failed[0]}")
        raise UserError(
            f"none of the {len(judged)} plans that were judged fits, says the judge {self.judging.name}: give a lower "
            "--memory-limit, so that plans leave more room."
        )

    def result(self, first: Fit, fit: Fit, rounds: int, settled: bool, why: str) -> Refinement:
        """Return the refinement's result, with the best plan first and its judgement in its provenance.

        - `first`, `fit`: figures of the first round and of the last.
        - `rounds`, `settled`, `why`: as in `Refinement`.
        """
        best = self.best()
        judged = {digest: _judged(case, first, fit) for digest, case in self.cases.items() if case.seen is not None}
        chosen = judged[best]
        refined = {
            "judge": self.judging.name,
            "seen_s": chosen.seen.seconds,
            "verdict": chosen.seen.verdict,
            "predicted_before_s": chosen.predicted_before_s,
            "predicted_after_s": chosen.predicted_after_s,
            "judged": len(judged),
            "rounds": rounds,
            "why": why,
        }
        plan = dataclasses.replace(chosen.plan, provenance=chosen.plan.provenance | {"refined": refined})
        chosen = dataclasses.replace(chosen, plan=plan)
        rest = [each for digest, each in judged.items() if digest != best]
        rest.sort(key=lambda each: (not each.seen.fits, each.seen.seconds or math.inf, each.name))
        judging, stored = self.judging.name, self.memory.stored
        return Refinement(plan, chosen, (chosen, *rest), judging, rounds, settled, why, fit, stored)


def _judged(case: _Case, first: Fit, fit: Fit) -> Judged:
    """Convert a case into a public record, with predictions from the first and the last figures."""
    assert case.seen is not None
    before, after = (case.bill.seconds(each.calibration) for each in (first, fit))
    return Judged(case.name, case.why, case.plan, case.seen, case.round, case.kept, before, after)


def _known(fit: Fit) -> str:
    """Describe the figures in use, for progress lines: shipped, or fitted to so many observations."""
    if not fit.observations:
        return "the shipped figures"
    return f"figures fitted to {fit.observations} {'observation' if fit.observations == 1 else 'observations'}"


def _line(case: _Case) -> str:
    """Describe the judgement of a judged case, for progress lines: the failure, the verdict, or judged and predicted
    time.
    """
    seen = case.seen
    assert seen is not None
    if seen.failed:
        return f"{case.name} is dropped: {seen.failed}"
    if seen.seconds is None:
        return f"{case.name} {seen.verdict}"
    predicted = format_seconds(case.plan.prediction.step_time_s)
    return f"{case.name} takes {format_seconds(seen.seconds)}, predicted {predicted}"


def refinement_figures(result: Refinement) -> dict[str, Any]:
    """Return the JSON object of `autoshard refine --json`; times are in seconds."""
    fit = result.fit
    return {
        "program": result.plan.program_name,
        "topology": result.plan.topology,
        "mesh": dict(result.plan.mesh),
        "judge": result.judge,
        "rounds": result.rounds,
        "settled": result.settled,
        "why": result.why,
        "step_time_s": _times(result.best),
        "best": result.best.name,
        "judged": [
            {
                "name": each.name,
                "why": each.why,
                "mesh": dict(each.plan.mesh),
                "round": each.round,
                "kept": each.kept,
                "step_time_s": _times(each),
                "error": each.seen.error,
                "verdict": each.seen.verdict or None,
                "fits": each.seen.fits,
                "peak_bytes": each.seen.peak_bytes,
                "failed": each.seen.failed or None,
            }
            for each in result.judged
        ],
        "learned": {
            "observations": fit.observations,
            "hash": fit.hash,
            "stored": result.stored or None,
            "residual": {"before": fit.residual_before, "after": fit.residual},
            "figures": {
                each.figure: {"shipped": each.shipped, "fitted": each.value, "error": each.error}
                for each in fit.figures
            },
        },
        "words": list(result.plan.words),
    }


def _times(each: Judged) -> dict[str, float | None]:
    """Return the judged seconds of a step, None without any, and the predicted ones before and after the fit."""
    return {
        "judged": each.seen.seconds,
        "predicted_before": each.predicted_before_s,
        "predicted_after": each.predicted_after_s,
    }
