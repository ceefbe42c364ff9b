"""Modules of torch's code bases: planned at a well-known size, and run small on 8 CPU devices.

    python experiments/models/code_bases.py [--only TEXT ...] [--again] [--table]

`full` plans the training step of the module on the meta device, with a searched mesh. The row has wall and processor
seconds from the start of the process to the plan, and peak memory.

`small` runs one step of SGD with momentum of the same module in a small form, planned with `data=4,model=2`. The step
is compared with the unplanned step in loss, momentum (which equals the gradients) and parameters, relative to each
tensor's own maximum. The loss and gradients of the unplanned step are compared with torch's own.

Rows are saved in `experiments/results/code_bases.json`, so that a broken run resumes. Each part of a row
(`LIBRARY MODULE/full`, `.../small`) has its own process with a limit of processor time.
"""

import dataclasses
import math
import os
import resource
import sys
import time
from typing import Any

from experiments.lib.harness import Experiment, grid, page, plain
from experiments.lib.programs.code_base_programs import PROGRAMS, Case
from experiments.models.families import is_rounding, row_of


DEVICES = 8
MESH = {"data": 4, "model": 2}
LIMIT_S = 300
"""Processor seconds for one part of a row."""
GOAL_S = 60
PARTS = ("full", "small")
ROWS = {f"{entry.library} {name}/{part}": (name, part) for part in PARTS for name, entry in PROGRAMS.items()}


def full(name: str) -> dict[str, Any]:
    """Plan the module at its well-known size."""
    began = time.perf_counter()
    from autoshard.errors import UserError
    from autoshard.planning import Options, make_plan
    from autoshard.program import from_torch

    entry = PROGRAMS[name]
    case = entry.make(True)
    row: dict[str, Any] = {"topology": entry.topology, "remat": entry.remat, "optimizer": entry.optimizer}
    row["parameters"] = sum(p.numel() for p in case.module.parameters())
    row["built_s"] = round(time.perf_counter() - began, 1)
    try:
        program = from_torch(
            case.module,
            case.inputs,
            case.kwargs,
            name=name,
            train=True,
            loss=case.loss,
            targets=case.targets,
            dtype="bfloat16",
            optimizer=entry.optimizer,
            remat=entry.remat,
            **case.options,
        )
        row["traced_s"] = round(time.perf_counter() - began - row["built_s"], 1)
        row["unscanned"] = [note for note in program.notes if "not scanned" in note]
        plan = make_plan(program, Options(topology=entry.topology)).plan
        row |= {"step_s": plan.prediction.step_time_s, "mesh": dict(plan.mesh), "words": list(plan.words)}
    except UserError as error:
        row["error"] = str(error)
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    row["wall_s"] = round(time.perf_counter() - began, 1)
    row["cpu_s"] = round(sum(each.ru_utime + each.ru_stime for each in spent), 1)
    row["peak_gib"] = round(max(each.ru_maxrss for each in spent) / 2**20, 2)
    return row


def small(name: str) -> dict[str, Any]:
    """Run the small form, planned, unplanned and in torch."""
    import numpy as np
    import torch

    from autoshard.errors import UserError
    from autoshard.exec import ensure_devices
    from autoshard.program import from_torch

    ensure_devices(DEVICES)
    case = PROGRAMS[name].make(False)
    with torch.no_grad():  # zero initial values would leave most gradients zero
        for parameter in case.module.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    options: dict[str, Any] = {"train": True, "loss": case.loss, "targets": case.targets, "optimizer": "momentum"}
    try:
        program = from_torch(case.module, case.inputs, case.kwargs, name=name, **options, **case.options)
    except UserError as error:
        return {"error": str(error)}
    make_args = program.make_args
    assert make_args is not None

    def ids_in_range(seed: int) -> tuple[Any, ...]:
        made = list(make_args(seed))
        rng = np.random.default_rng(seed)
        for key, value in made[2].items():
            limit = next((n for start, n in case.limits.items() if key.startswith(start)), None)
            if limit is not None and np.issubdtype(value.dtype, np.integer):
                made[2][key] = rng.integers(0, limit, value.shape).astype(value.dtype)
        return tuple(made)

    program = dataclasses.replace(program, make_args=ids_in_range)
    return beside_torch(program, case) | row_of(program, MESH, asked=split_somewhere(program))


def split_somewhere(program: Any) -> Any:
    """Pin one input over `data` and the largest weight over `model`.

    Without pins the planner replicates most of these small forms, and the comparison would test nothing.
    """
    from autoshard.planning import read_asked

    pins: dict[str, str] = {}
    inputs = [
        a for a in program.arguments if a.name.startswith("batch.") and a.shape and a.shape[0] % MESH["data"] == 0
    ]
    if inputs:
        pins[inputs[0].name] = ",".join(["data", *["?"] * (len(inputs[0].shape) - 1)])
    weights = [a for a in program.arguments if a.name in program.weights and len(a.shape) > 1]
    even = [a for a in weights if a.shape[-1] % MESH["model"] == 0]
    if even:
        largest = max(even, key=lambda a: math.prod(a.shape))
        stacked = len(program.weights[largest.name]) > 1
        pins[largest.name] = ",".join([*["?"] * (len(largest.shape) - 1 - stacked), "model"])
    return read_asked(pins)


def beside_torch(program: Any, case: Case) -> dict[str, Any]:
    """Return differences of the unplanned step's loss and gradients from torch's own, relative to a tensor's maximum.

    A gradient below a hundred-thousandth of the largest is mere rounding, so that this share replaces its maximum.
    """
    import jax
    import numpy as np
    import torch
    from torch.utils import _pytree

    from autoshard.program.argument_names import input_names, leaf_name

    args = program.make_args(0)
    names = input_names(case.module, len(case.inputs))
    given: dict[str, Any] = dict(zip(names, case.inputs, strict=True)) | case.kwargs
    if case.targets is not None:
        given["targets"] = case.targets
    flat, tree = _pytree.tree_flatten_with_path(given)
    leaves = [
        torch.from_numpy(np.array(args[2][leaf_name(path)])).to(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in flat
    ]
    given = _pytree.tree_unflatten(leaves, tree)
    targets = (given.pop("targets"),) if case.targets is not None else ()
    output = case.module(*[given.pop(each) for each in names], **given)
    assert case.loss is not None
    loss = case.loss(output, *targets)
    loss.backward()
    results = jax.jit(program.fn)(*args)
    ours = float(results[-1])
    gradients = {name: np.asarray(value) for name, value in results[1][0].trace.items()}
    own = {name: p.grad.numpy() for name, p in case.module.named_parameters() if p.grad is not None}
    largest = max(float(np.abs(value).max()) for value in own.values())
    worst = ("", 0.0)
    for name, members in program.weights.items():
        for number, member in enumerate(members):
            mine = gradients[name][number] if len(members) > 1 else gradients[name]
            theirs = own.get(member, np.zeros_like(mine))
            scale = max(float(np.abs(theirs).max()), 1e-5 * largest)
            worst = max(worst, (member, float(np.abs(mine - theirs).max()) / scale), key=lambda each: each[1])
    theirs = float(loss.detach())
    return {
        "torch_loss": abs(ours - theirs) / max(abs(theirs), 1e-6),
        "torch_gradient": worst[1],
        "torch_worst": worst[0],
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = []
    planned = within = ran = equal = rounding = 0
    for name, entry in PROGRAMS.items():
        large, little = (rows.get(f"{entry.library} {name}/{part}", {}) for part in PARTS)
        if not large and not little:
            continue
        remarks = [each["error"] for each in (large, little) if "error" in each]
        planned += "step_s" in large
        within += "step_s" in large and large["cpu_s"] <= GOAL_S
        if "max_rel_diff" in little:
            ran += 1
            equal += little["equal"]
            rounding += is_rounding(little)
            if not little["equal"]:
                remarks.append(f"`{little['worst']}`; rounding {little['rounding']:.1e}")
        lines.append(
            [
                entry.library,
                name,
                f"{large['parameters'] / 1e6:,.0f} M" if large.get("parameters") else "-",
                f"`{entry.topology}`{', remat ' + entry.remat if entry.remat != 'none' else ''}",
                *(large.get(key, "-") for key in ("cpu_s", "wall_s", "peak_gib")),
                f"{large['step_s'] * 1e3:.1f} ms" if "step_s" in large else "-",
                f"{little['max_rel_diff']:.1e}" if "max_rel_diff" in little else "-",
                f"{little['torch_loss']:.0e}, {little['torch_gradient']:.0e}" if "torch_loss" in little else "-",
                plain(" ".join(dict.fromkeys(remarks))),
            ]
        )
    large = {ROWS[key][0]: row for key, row in rows.items() if key.endswith("/full")}
    return page(
        "# Modules of torch's code bases",
        """
`python experiments/models/code_bases.py`. Left: the training step at a well-known size, in bf16 with fp32 state,
planned with a searched mesh; seconds of the processor and on the clock (of a machine that others use too)
from the start of the process to the plan, its peak memory, and the step that is predicted. Right: a small
form on 8 CPU devices, mesh `data=4,model=2`, an input fixed over `data` and the largest weight over `model`,
one step of SGD with momentum: the largest difference of any
result (loss, momentum, which holds the gradients, parameters) from the unplanned step, of its tensor's own
maximum; and of the unplanned step's loss and gradients from torch's own.
""",
        grid(
            "library | module | parameters: | topology | processor s: | clock s: | GiB: | predicted step: "
            "| planned - unplanned: | loss, gradients - torch's: | remark",
            lines,
        ),
        f"{len(large)} of {len(PROGRAMS)} tried at full size: {planned} planned, {within} of them within {GOAL_S} s of "
        f"the processor. {ran} ran small: {equal} equal to the unplanned step, {rounding} that differ by no more than "
        "the unplanned step with its examples in another order does.",
        "Layers that repeat but are not computed as a loop, by what the note says:",
        [f"- {name}: {note}" for name, row in sorted(large.items()) for note in row.get("unscanned", [])],
    )


def work(key: str) -> dict[str, Any]:
    """Compute one part of a row; more processor time than its limit ends the process."""
    name, part = ROWS[key]
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 5))
    return {"full": full, "small": small}[part](name)


def main() -> int:
    # Eight devices on a shared machine wait for each other longer than XLA's default limit. Code that runs once is not
    # worth LLVM's optimisation.
    patient = "--xla_cpu_collective_call_terminate_timeout_seconds=1200 --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {patient}"
    return Experiment(
        script=__file__, names=ROWS, work=work, table=table, apart=True, environment={"XLA_FLAGS": flags}
    ).run()


if __name__ == "__main__":
    sys.exit(main())
