"""What holds a plan back, in sentences."""

from autoshard.plan import WAITS_FOR_HOST, Collective, Plan, Prediction, axis_words
from autoshard.report._names import readable
from autoshard.units import format_bytes, format_seconds


def what_binds(plan: Plan) -> tuple[str, ...]:
    """What limits the step time and memory, what other compiler flags gain, and how much room the bound leaves."""
    return (*_time(plan), *_memory(plan), *_flag_sets(plan), *_gaps(plan))


def _time(plan: Plan) -> list[str]:
    prediction = plan.prediction
    total = prediction.compute_s + prediction.exposed_comm_s
    if total <= 0:
        return []
    share = prediction.exposed_comm_s / total
    if plan.by_stage and plan.pipeline is not None:
        bubble = plan.pipeline.bubble()
        return [f"Of the time in the stages {bubble:.1%} is bubble; inside of them {share:.1%} is communication."]
    if share < 0.005:
        return ["Compute sets the step time: hardly any communication is exposed."]
    worst = _worst_exposed(prediction)
    costliest = f"; the costliest is {worst}" if worst else ""
    lines = [f"Exposed communication is {share:.0%} of the step{costliest}."]
    waits = sum(s.seconds for s in plan.timeline.spans if s.name == WAITS_FOR_HOST) if plan.timeline else 0.0
    if waits > 0.005 * total:
        lines.append(
            f"Of it the step waits {format_seconds(waits)} for what comes from the hosts' memory or goes there, beyond "
            "what is computed meanwhile."
        )
    return lines


def _flag_sets(plan: Plan) -> list[str]:
    """The set of compiler flags that gains most for this very plan, if any gains enough to be said."""
    gains = plan.provenance.get("flag_sets")
    if not gains:
        return []
    name, step = min(gains.items(), key=lambda item: (item[1], item[0]))
    share = 1.0 - step / plan.prediction.step_time_s
    return [
        f"With --xla-flags {name} this plan takes {format_seconds(step)}, {share:.0%} less; one made so may take less."
    ]


def _worst_exposed(prediction: Prediction) -> str:
    """The kind of collective, and the axes, that expose most communication, with the largest of its causes."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in prediction.collectives:
        if collective.waited_s > 0:
            groups.setdefault((collective.kind, collective.axes), []).append(collective)
    if not groups:
        return ""
    (kind, axes), members = max(groups.items(), key=lambda item: sum(c.waited_s for c in item[1]))
    largest = max(members, key=lambda c: c.waited_s)
    cause = f"{', chiefly' if len(members) > 1 else ''} for {readable(largest.cause)}" if largest.cause else ""
    return f"{kind} over {' x '.join(axis_words(axes))}, {format_seconds(sum(c.waited_s for c in members))}{cause}"


def _memory(plan: Plan) -> list[str]:
    prediction = plan.prediction
    if not prediction.memory:
        return []
    kind, size = max(prediction.memory.items(), key=lambda item: item[1])
    where = f" at {readable(prediction.peak_at)}" if prediction.peak_at else ""
    room = plan.memory_limit_bytes - prediction.peak_bytes
    left = f"{format_bytes(room)} is left" if room >= 0 else f"{format_bytes(-room)} is missing"
    words = kind.replace("_", " ") + (" hold" if kind.endswith("s") else " holds")
    return [f"Memory peaks{where}, where {words} most ({format_bytes(size)}); {left}."]


def _gaps(plan: Plan) -> list[str]:
    if plan.by_stage:
        return [
            f"The step is within {plan.plan_gap:.1%} of a lower bound for all cuts between modules by this schedule, "
            "under the prices of the plan inside of stages."
        ]
    solver = "is optimal" if plan.solver_gap <= 0 else f"is within {plan.solver_gap:.2%} of optimal (solver gap)"
    return [
        f"The solution of the Problem {solver}; the predicted step time is within {plan.plan_gap:.1%} of a certified "
        "lower bound for every plan on this mesh (plan gap)."
    ]


def why_not(plan: Plan, name: str) -> tuple[str, ...]:
    """Why the plan was preferred to one of its baselines."""
    own, other = plan.prediction, plan.baselines[name]
    sentences = []
    if not other.fits:
        over = other.peak_bytes - plan.memory_limit_bytes
        kind, size = max(other.memory.items(), key=lambda item: item[1], default=("", 0))
        most = f", of which {kind.replace('_', ' ')} take {format_bytes(size)}" if kind else ""
        sentences.append(
            f"It does not fit: it needs {format_bytes(other.peak_bytes)} a device{most}, {format_bytes(over)} too much."
        )
    slower = other.step_time_s - own.step_time_s
    if slower <= 0.005 * own.step_time_s:
        faster = f"it would be {format_seconds(-slower)} faster" if slower < 0 else "it is about as fast as the plan"
        sentences.append(f"By time alone {faster}.")
        return tuple(sentences)
    parts = {
        "compute": other.compute_s - own.compute_s,
        "exposed communication": other.exposed_comm_s - own.exposed_comm_s,
    }
    main, amount = max(parts.items(), key=lambda item: item[1])
    share = f"{slower / own.step_time_s:.1%} " if own.step_time_s else ""  # a program without ops takes no time
    sentence = f"It is {share}slower, chiefly by {format_seconds(amount)} more {main}"
    worst = _worst_exposed(other)
    if main != "compute" and worst:
        sentence += f"; its costliest is {worst}"
    return (*sentences, sentence + ".")
