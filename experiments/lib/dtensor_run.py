"""Distributed modules of transformers compared with undistributed ones, on eight processes over gloo.

`python -m experiments.lib.dtensor_run ROWS.json` reads a list of rows, and prints one line of JSON for each. A row has
a configuration's `fields`, a `plan` file, and the flag `train`. The processes are forked once torch is imported.
"""

import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any


PROCESSES = 8
IDS = 16
"""Bound of token ids and classes in the batches."""
SEEN = 1e-3
"""Share of a tensor's largest gradient from which updates are compared: AdamW divides smaller ones by noise."""


def build(fields: dict[str, Any]) -> Any:
    """Build the module of a configuration, with equal weights in every process and without dropout."""
    import torch
    import transformers

    torch.manual_seed(0)
    kept = {key: value for key, value in fields.items() if key not in ("architectures", "model_type")}
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[fields["model_type"]](**kept)
    return getattr(transformers, fields["architectures"][0])(config).eval()


def batch_of(plan: Any) -> dict[str, Any]:
    """Make a batch of the plan's shapes, by name."""
    import torch

    batch = {}
    for name, role in plan.roles.items():
        if role != "batch":
            continue
        shape, plain = plan.shapes[name], name.removeprefix("batch.")
        if "float" in plan.dtypes[name]:
            batch[plain] = torch.randn(shape)
        else:
            batch[plain] = torch.ones(shape).long() if "mask" in plain else torch.randint(1, IDS, shape)
    return batch


def off(found: Any, wanted: Any, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((found - wanted).abs().max() / max(float(wanted.abs().max()), least, 1e-30))


def sent(kind: str, args: Any) -> float:
    """Return the bytes that one device sends for a ring collective, as plans predict them."""
    from torch._C._distributed_c10d import _resolve_process_group

    parts = _resolve_process_group(args[-1]).size()
    size = args[0].numel() * args[0].element_size()
    by_kind = {"all_gather_into_tensor": parts - 1.0, "all_reduce": 2 * (parts - 1) / parts}
    return size * by_kind.get(kind, (parts - 1) / parts)


def run_row(row: dict[str, Any]) -> dict[str, Any]:
    """Run one row in this process, and return its figures."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    import autoshard
    from autoshard.exec import distribution_notes

    class Calls(TorchDispatchMode):
        """Counter of collectives; torch's own CommDebugMode also tracks modules, and raises IndexError for T5."""

        def __init__(self) -> None:
            super().__init__()
            self.counts = Counter[str]()
            self.wire_bytes = 0.0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # DTensor's own collectives reach this function next
            if func.namespace == "_c10d_functional" and "wait" not in str(func):
                kind = func.__name__.partition(".")[0]
                self.counts[kind] += 1
                self.wire_bytes += sent(kind, args)
            return func(*args, **(kwargs or {}))

    plan = autoshard.load(row["plan"])
    model, batch = build(row["fields"]), batch_of(plan)
    mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))

    def step(whole: Any) -> dict[str, Any]:
        """Return loss, gradients and updated parameters of a training step, or the output of inference."""
        if not row["train"]:
            with torch.no_grad():
                return {"output": whole(model(**batch)[0])}
        loss = model(**batch).loss
        loss.backward()
        return {"loss": whole(loss.detach())}

    def state(whole: Any) -> dict[str, dict[str, Any]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        after = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
        return {"gradients": gradients, "updates": {name: after[name] - before[name] for name in after}}

    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted = step(lambda value: value)
    wanted |= state(lambda value: value) if row["train"] else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    plan.distribute(model, mesh)

    def whole(value: Any) -> Any:
        return value.full_tensor()

    began = time.monotonic()
    found = step(whole)
    first_s = time.monotonic() - began
    found |= state(whole) if row["train"] else {}
    comm = Calls()
    optimizer = torch.optim.AdamW(model.parameters()) if row["train"] else None
    began = time.monotonic()
    with comm:
        step(lambda value: value)
        if optimizer is not None:
            optimizer.step()
    said: dict[str, Any] = {"first_s": first_s, "later_s": time.monotonic() - began}
    for key in ("loss", "output"):
        if key in wanted:
            said[key] = off(found[key], wanted[key])
    if row["train"]:
        gradients, updates = wanted["gradients"], wanted["updates"]
        assert gradients.keys() == found["gradients"].keys()
        top = max(float(each.abs().max()) for each in gradients.values())
        said["gradients"] = max(off(found["gradients"][n], each, SEEN * top) for n, each in gradients.items())
        seen = {n: each.abs() > max(SEEN * float(each.abs().max()), SEEN * top) for n, each in gradients.items()}
        said["updates"] = max(off(found["updates"][n][at], updates[n][at]) for n, at in seen.items() if bool(at.any()))
        said["updates_seen"] = sum(int(at.sum()) for at in seen.values()) / sum(at.numel() for at in seen.values())
    held = [(p.to_local().numel(), p.numel()) for p in model.parameters()]
    said["split_share"] = sum(n for local, n in held if local < n) / sum(n for _, n in held)
    said["held_share"] = sum(local for local, _ in held) / sum(n for _, n in held)
    said["calls"] = dict(comm.counts)
    said["wire_bytes"] = comm.wire_bytes
    said["notes"] = list(distribution_notes(model))
    return said


def work(rank: int, store: str, rows: list[dict[str, Any]]) -> None:
    """Run all rows in one process; the first process prints the worst value of all processes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    for row in rows:
        try:
            said = run_row(row)
        except Exception as error:
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}"}
        every: list[Any] = [None] * PROCESSES
        dist.all_gather_object(every, said)
        if rank == 0:
            errors = [each["error"] for each in every if "error" in each]
            worst = {key: max(each[key] for each in every) for key, value in said.items() if isinstance(value, float)}
            print(json.dumps({"error": errors[0]} if errors else said | worst), flush=True)
        if any("error" in each for each in every):
            break
    dist.destroy_process_group()


def in_forks(count: int, run: Callable[[int], None]) -> None:
    """Call `run` with its rank in each of `count` forks of this process, and wait for their end."""
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            try:
                run(rank)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def main() -> None:
    with open(sys.argv[1]) as file:
        rows = json.load(file)
    import transformers.models.auto.configuration_auto

    for row in rows:
        getattr(transformers, row["fields"]["architectures"][0])  # imported once, before the fork
    import autoshard.exec.dtensor.distributed_module  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        in_forks(PROCESSES, lambda rank: work(rank, f"{folder}/store", rows))


if __name__ == "__main__":
    main()
