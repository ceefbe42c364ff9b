"""Plan, judge, learn, plan again: until the choice stands.

Each round plans with what is known, lets a judge see the few best plans that really differ, keeps what it saw in the
user's database as soon as it is known, and fits the figures to it. A run that was interrupted, or is made again, plans
its first round with what others have seen and finds its own judgements in the database instead of making them again.
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
"""Plans that are judged in a round, and most rounds, unless asked otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """One plan that a judge was asked about."""

    name: str
    """The name that `PlanCandidate` has, with the round where two would have one name."""
    why: str
    """How the plan was found."""
    plan: Plan
    seen: Seen
    round: int
    kept: bool
    """True if the judgement was in the database already."""
    predicted_before_s: float
    """Step time with the figures of the first round."""
    predicted_after_s: float
    """Step time with the figures of all that was learned."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refinement:
    """What a refinement came to."""

    plan: Plan
    """The plan with the least judged time of those that fit; its provenance says so under `refined`."""
    best: Judged
    judged: tuple[Judged, ...]
    """All plans that were judged, the best first, those that do not fit and those that failed last."""
    judge: Judge
    rounds: int
    settled: bool
    """Whether the choice stood; otherwise the rounds ran out."""
    why: str
    """Why it ended, in a sentence."""
    fit: Fit
    """The figures as they are now, and how sure."""


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
    """Plan `program` on `topology`, have the best few plans judged, learn from it, plan again until the choice stands.

    `judge` is `"measure"` (the devices that are here, `steps` timed steps of each plan; the default for CPU
    topologies) or `"compile"` (the compiler of TPUs or of GPUs, with none present, at most `compile_limit` seconds for
    each plan, which are tasks of `executor` if there is one, as of `compile_plans`). `plans` is how many plans that
    really differ are judged in a round, `rounds` how many rounds there are at most. What is seen is kept in the user's
    database and used by later plans of the topology; with `calibration=False` the database is neither read nor
    written. What is seen of steps with compiler flags
    (`xla_flags`) serves plans with the same flags alone. The other `options` are those of `autoshard.plan`.

    A judge that fails on a plan drops that plan, and says why. Raises `UserError` if it fails on all of them or none
    fits, and as `autoshard.plan` does.
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
    if read.ignore_constraints:  # here, as what is judged must be what is planned
        program, read = lift_constraints(program), dataclasses.replace(read, ignore_constraints=False)
    flags, _ = chosen_flags(read.xla_flags, parsed.chip)
    database = Database.of_user() if read.calibration else None
    memory = _Memory(parsed, flags, judging.name, program.fingerprint, database)
    planning = dataclasses.replace(read, candidates=plans)
    return _Refiner(program, planning, judging, memory, progress or (lambda line: None)).run(rounds)


class _Memory:
    """What was seen: in the database, and by this run, which goes on where nothing can be kept."""

    def __init__(
        self, topology: Topology, flags: Sequence[str], judge: Judge, program: str, database: Database | None
    ) -> None:
        self.topology, self.flags, self.program, self.database = topology, flags, program, database
        self.judge: Judge = judge
        self.compiler = compiler_version(topology, flags)
        self.mine: list[Observation] = []

    def all(self) -> list[Observation]:
        """Everything of this topology and compiler, once."""
        kept = self.database.read(self.topology.name, self.compiler) if self.database is not None else []
        return list({one.id: one for one in (*kept, *self.mine)}.values())

    def of_others(self) -> list[Observation]:
        """What this run would know if it were the first on its program."""
        own = (self.judge, self.program)
        return [one for one in self.all() if (one.judge, one.about.get("program")) != own]

    def fit(self, observations: Sequence[Observation]) -> Fit:
        return fit_observations(self.topology, observations, self.flags)

    def judgements(self) -> dict[str, Seen]:
        """What this judge said of plans of this program earlier, by their digests; of several the first by id."""
        found: dict[str, Seen] = {}
        for one in sorted(self.all(), key=lambda o: o.id):
            if one.op == STEP and (one.judge, one.about.get("program")) == (self.judge, self.program):
                found.setdefault(one.about["plan"], Seen(**one.seen))
        return found

    def keep(self, plan: Plan, name: str, bill: Bill, seen: Seen) -> None:
        about = {"program": self.program, "plan": plan_digest(plan), "name": f"{plan.program_name}: {name}"}
        one = Observation(self.topology.name, self.compiler, self.judge, STEP, about, bill, seen.to_json())
        self.mine.append(one)
        if self.database is not None:
            self.database.add([one])


@dataclasses.dataclass(slots=True)
class _Case:
    """A plan that was offered, and what became of it."""

    name: str
    why: str
    plan: Plan
    bill: Bill
    round: int
    seen: Seen | None = None
    kept: bool = False


class _Refiner:
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
        """By digest."""

    def run(self, rounds: int) -> Refinement:
        first = fit = self.memory.fit(self.memory.of_others())
        earlier: str | None = None
        settled, why, number = False, "", 0
        for number in range(1, rounds + 1):
            self.progress(f"Round {number}: planning with {_known(fit)}")
            made = make_plan(self.program, dataclasses.replace(self.planning, calibration=fit))
            choice = plan_digest(made.plan)
            self.judge(self.offered(made, number), number)
            fit = self.memory.fit(self.memory.all())
            best = self.best()
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
        """The plans to judge in a round, ours first, no two of them one."""
        found: dict[str, tuple[str, str, Plan]] = {}
        for each in made.candidates:
            found.setdefault(plan_digest(each.plan), (each.name, each.why, each.plan))
        named = made.plan.baselines
        for name in sorted(named, key=lambda name: (named[name].step_time_s, name)):
            if len(found) >= self.planning.candidates:
                break
            if named[name].fits:
                plan = made.baseline_plans[name]
                found.setdefault(plan_digest(plan), (f"{name}*", "baseline, completed by the solver", plan))
        chosen = dict(list(found.items())[: self.planning.candidates])
        new = {digest: each for digest, each in chosen.items() if digest not in self.cases}
        bills = plan_bills(self.program, [plan for _, _, plan in new.values()])
        for (digest, (name, why, plan)), bill in zip(new.items(), bills, strict=True):
            taken = {case.name for case in self.cases.values()}
            label = f"{name}, round {number}" if name in taken else name
            self.cases[digest] = _Case(label, why, plan, bill, number)
        return [self.cases[digest] for digest in chosen]

    def judge(self, cases: Iterable[_Case], number: int) -> None:
        """Ask the judge of all that it has not judged yet."""
        known = self.memory.judgements()
        asked: dict[str, _Case] = {}
        for case in cases:
            if case.seen is not None:
                continue
            case.seen = known.get(plan_digest(case.plan))
            case.kept = case.seen is not None
            if case.seen is None:
                asked[case.name] = case
            else:
                self.progress(f"Round {number}: {_line(case)} (judged before)")
        plans = {name: case.plan for name, case in asked.items()}
        for name, seen in self.judging.judge(self.program, plans, self.progress):
            case = asked[name]
            case.seen = seen
            if not seen.failed:
                self.memory.keep(case.plan, name, case.bill, seen)
            self.progress(f"Round {number}: {_line(case)}")

    def best(self) -> str:
        """Digest of the plan with the least judged time that fits. Raises `UserError` if there is none."""
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
        return Refinement(plan, chosen, (chosen, *rest), self.judging.name, rounds, settled, why, fit)


def _judged(case: _Case, first: Fit, fit: Fit) -> Judged:
    assert case.seen is not None
    before, after = (case.bill.seconds(each.calibration) for each in (first, fit))
    return Judged(case.name, case.why, case.plan, case.seen, case.round, case.kept, before, after)


def _known(fit: Fit) -> str:
    if not fit.observations:
        return "the shipped figures"
    return f"figures fitted to {fit.observations} {'observation' if fit.observations == 1 else 'observations'}"


def _line(case: _Case) -> str:
    seen = case.seen
    assert seen is not None
    if seen.failed:
        return f"{case.name} is dropped: {seen.failed}"
    if seen.seconds is None:
        return f"{case.name} {seen.verdict}"
    predicted = format_seconds(case.plan.prediction.step_time_s)
    return f"{case.name} takes {format_seconds(seen.seconds)}, predicted {predicted}"


def refinement_figures(result: Refinement) -> dict[str, Any]:
    """The JSON object of `autoshard refine --json`."""
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
            "residual": {"before": fit.residual_before, "after": fit.residual},
            "figures": {
                each.figure: {"shipped": each.shipped, "fitted": each.value, "error": each.error}
                for each in fit.figures
            },
        },
        "words": list(result.plan.words),
    }


def _times(each: Judged) -> dict[str, float | None]:
    return {
        "judged": each.seen.seconds,
        "predicted_before": each.predicted_before_s,
        "predicted_after": each.predicted_after_s,
    }
