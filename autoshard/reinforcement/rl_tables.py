"""Ways to use chips for reinforcement learning as a table, as figures for scripts, and as commands."""

import math
import shlex
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import format_bytes, format_count, format_seconds
from autoshard.reinforcement.rl_plan import MODES, RlPlan, RlWay
from autoshard.reinforcement.trainer import Trainer
from autoshard.report.display import OneLine, clean
from autoshard.serving import ServingLimits, ServingPlan, ServingPoint, ServingRequests, vllm_commands


MOST_SHOWN = 8
"""Most ways of the table, apart from the fastest in turn on the same and on own chips, which have a row anyway."""
_NOTE = (
    "A way has a line for its sampler and one for its trainer. By closed form; no program is traced. Times of samplers "
    "are 10 % off in the median of measured points, those of trainers within 21 % in nine of ten runs on GPUs, and "
    "16 % off on TPUs. Moves are least times. Rewards, data and start-up of phases are not counted: published steps "
    "took 1.5 times as long in the median, with the same degrees."
)


def rl_figures(plan: RlPlan) -> dict[str, Any]:
    """Return the object that `autoshard rl-plan --json` prints: all ways, the fastest first; times in seconds."""
    work = plan.work
    return {
        "model": plan.model.config,
        "topology": plan.topology.name,
        "sequences": work.sequences,
        "prompt": work.prompt,
        "answer": work.answer,
        "longest": work.longest,
        "answers": work.answers,
        "updates": work.updates,
        "scores": work.scores,
        "staleness": work.staleness,
        "tokens": work.tokens,
        "commands": rl_commands(plan, plan.ways[0]),
        "failed": list(plan.failed),
        "ways": [_way_figures(plan, way) for way in plan.ways],
    }


def _way_figures(plan: RlPlan, way: RlWay) -> dict[str, Any]:
    """Return the figures of a way; the degrees of its trainer are those of its framework, or of a first estimate."""
    sampler, trainer, move = way.sampler, way.trainer, way.move
    return {
        "order": way.mode,
        "colocated": way.colocated,
        "sampler_topology": sampler.topology.name,
        "trainer_topology": trainer.topology.name,
        "engines": sampler.engines,
        "tensor": sampler.engine.tensor,
        "attention": sampler.engine.attention,
        "experts": sampler.engine.experts,
        "seats": sampler.seats,
        "degrees": dict(trainer.degrees),
        "batch": trainer.batch,
        "sample_s": way.sample_s,
        "drained_s": sampler.drained_s if way.mode != "continuous" else 0.0,
        "score_s": trainer.score_s,
        "train_s": trainer.train_s,
        "move_s": move.seconds,
        "broadcast_s": move.broadcast_s,
        "offload_s": way.offload_s,
        "step_s": way.step_s,
        "tokens_per_s": plan.work.tokens / way.step_s,
        "staleness": way.staleness,
        "idle_sampler": way.idle[0],
        "idle_trainer": way.idle[1],
        "sampler_bytes": sampler.peak_bytes,
        "trainer_bytes": trainer.peak_bytes,
        "weight_bytes": move.whole_bytes,
        "received_bytes": max(move.received_bytes),
        "network_bytes": max(*move.entering_bytes, *move.leaving_bytes),
    }


def shown_ways(plan: RlPlan) -> list[RlWay]:
    """Return the fastest ways, and if they are not among them the fastest in turn on the same and on own chips."""
    shown = list(plan.ways[:MOST_SHOWN])
    for colocated in (True, False):
        turns = [way for way in plan.ways if way.mode == "in turn" and way.colocated == colocated]
        shown += [way for way in turns[:1] if way not in shown]
    return shown


def rl_report(plan: RlPlan) -> RenderableType:
    """Return the table of the fastest ways, and of the fastest one degrees, moved bytes, idle time and commands."""
    work, best = plan.work, plan.ways[0]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("order", "chips", "layout"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "idle", "GiB", "move", "step", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in shown_ways(plan):
        table.add_row(*_cells(plan, way), style="bold" if way is best else "")
    lengths = f"answers of {work.answer} tokens" + (f", at most {work.longest}" if work.longest > work.answer else "")
    head = f"{clean(plan.model.config)} on {plan.topology.name}: {work.sequences} {lengths}, prompts of {work.prompt}"
    lines: list[RenderableType] = [Text(head, style="bold"), Text(), table, Text()]
    for text in _sentences(plan, best):
        lines.append(Text(text))
    lines += [Text(), Text(_NOTE, style="dim")]
    for text in rl_commands(plan, best):
        lines += [Text(), OneLine(text)]
    return Group(*lines)


def _cells(plan: RlPlan, way: RlWay) -> tuple[str, ...]:
    """Return the texts of a way's row: a line for the sampler above one for the trainer, then those of the step."""
    sampler, trainer = way.sampler, way.trainer
    degrees = trainer.degrees
    names = ("dp", "tp", "pp", *(("ep",) if plan.model.decoder.experts > 1 else ())) if trainer.framework else ()
    words = " ".join(f"{name}{degrees[name]}" for name in names)
    idle = () if way.colocated else (f"{100 * share:.0f} %" for share in way.idle)
    seconds = (way.sample_s, way.learn_s)
    return (
        way.mode,
        f"{sampler.topology.num_chips}\n{trainer.topology.num_chips}",
        f"{_counted(sampler.engines, 'engine')} of {sampler.engine.devices}\n{words or _mesh(trainer)}",
        "\n".join(map(format_seconds, seconds)),
        "\n".join(idle),
        f"{sampler.peak_bytes / 2**30:.0f}\n{trainer.peak_bytes / 2**30:.0f}",
        format_seconds(way.move.seconds + way.offload_s),
        format_seconds(way.step_s),
        format_count(plan.work.tokens / way.step_s),
    )


def _mesh(trainer: Trainer) -> str:
    """Return the mesh of a first estimate as text, without axes of one device."""
    sizes = {axis: int(trainer.degrees[axis]) for axis in ("data", "model")}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"


def _sentences(plan: RlPlan, way: RlWay) -> list[str]:
    """Return what a user must know of the fastest way: its order, degrees, tail of answers, moved bytes, freshness."""
    sampler, trainer, move, work = way.sampler, way.trainer, way.move, plan.work
    place = f"All {plan.topology.num_chips} chips sample and train."
    if not way.colocated:
        place = f"{sampler.topology.num_chips} chips ({sampler.topology.name}) sample, and "
        place += f"{trainer.topology.num_chips} ({trainer.topology.name}) train."
    old = f"; they are at most {_counted(way.staleness, 'step')} old" if way.staleness else ""
    batch = work.sequences // work.updates
    padded = f", padded to {trainer.batch}" if trainer.batch != batch else ""
    room = ""
    if trainer.framework:
        room = f", the fastest with room for a sequence of {work.prompt + work.longest} tokens"
        room += " and a reference's weights" if trainer.reference_bytes else ""
    lines = [
        f"{place} {MODES[way.mode]}{old}.",
        f"Sampler: {_counted(sampler.engines, 'engine')} of {_counted(sampler.engine.devices, 'device')}, each with "
        f"{sampler.seats * sampler.engine.attention} sequences at a time. Trainer: {trainer.words}{room}; "
        f"{_counted(work.updates, 'update')} of {batch} sequences{padded}.",
    ]
    if way.mode != "continuous":
        lines.append(
            f"Less than half of the sampler's seats are busy in {format_seconds(sampler.drained_s)} of "
            f"{format_seconds(sampler.seconds)}, while the longest answers end."
        )
    lines.append(
        f"Scores take {format_seconds(trainer.score_s)} and updates {format_seconds(trainer.train_s)} of the trainer's "
        f"{format_seconds(way.learn_s)}."
    )
    if way.offload_s:
        lines.append(
            f"{format_bytes(trainer.resident_bytes)} of each device's training state go to the host's memory and back "
            f"in each step ({format_seconds(way.offload_s)})."
        )
    network = max(*move.entering_bytes, *move.leaving_bytes)
    lines.append(
        f"New weights: {format_bytes(move.whole_bytes)}, of which a device receives "
        f"{format_bytes(max(move.received_bytes))}"
        + (f" and an island {format_bytes(network)} over the network" if network else "")
        + f", in {format_seconds(move.seconds)} at least; a broadcast of whole tensors from one device takes "
        f"{format_seconds(move.broadcast_s)}."
    )
    return lines


def _counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def rl_commands(plan: RlPlan, way: RlWay) -> list[str]:
    """Return the commands for a way: `vllm serve` for the sampler, and the one that plans the trainer's step."""
    return [*_serve_commands(plan, way), _train_command(plan, way)]


def _serve_commands(plan: RlPlan, way: RlWay) -> list[str]:
    """Return vLLM's commands for the sampler of a way."""
    sampler, work = way.sampler, plan.work
    point = ServingPoint(
        sampler.engine, sampler.engines, sampler.seats * sampler.engine.attention, sampler.chunk, 0.0, 0.0, 0.0, 0.0,
        sampler.peak_bytes, int(sampler.limit_bytes), work.answer,
    )  # fmt: skip
    asked = ServingRequests(work.prompt, work.longest, work.weights, work.cache)
    serving = ServingPlan(
        plan.model.config, plan.model.decoder, sampler.topology.name, asked, ServingLimits(), (point,), point, (point,),
        math.floor(100 * sampler.limit_bytes / sampler.topology.usable_bytes) / 100,
    )  # fmt: skip
    return vllm_commands(serving)


def _train_command(plan: RlPlan, way: RlWay) -> str:
    """Return the command of autoshard that plans one update: `degrees` on GPUs, else `plan`."""
    trainer, work = way.trainer, plan.work
    step = f"{shlex.quote(plan.model.config)} --topology {shlex.quote(trainer.topology.name)}"
    if trainer.framework:
        return f"autoshard degrees {step} --framework {trainer.framework} --batch {trainer.batch} --seq {work.length}"
    degrees = trainer.degrees
    return (
        f"autoshard plan {step} --train --batch {trainer.batch} --seq {work.length} --mesh {_mesh(trainer)} "
        f"--remat {degrees['remat']} --microbatches {degrees['microbatches']}"
    )
