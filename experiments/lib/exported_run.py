"""Exports of plans for torch run on the plan's number of processes over gloo, and compared with the module on one.

`python -m experiments.lib.exported_run ROWS.json` reads a list of rows, and prints one line of JSON for each. A row has
a configuration's `fields`, a `plan` file, the `form` and the `code` file of the export. A step is loss, backward,
`clip_grad_norm_`, AdamW, and a checkpoint of whole tensors.
"""

import importlib
import json
import math
import os
import runpy
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.lib.dtensor_run import batch_of, build, in_forks, off


CLIP = 0.1
"""Norm to which gradients are clipped, below that of every model here."""


def wire_bytes(name: str, args: Any) -> float:
    """Return the bytes that one device sends for a ring collective of torch, by the name of its op; 0 for others."""
    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_leaves

    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    groups = [each for each in args if isinstance(each, (torch.ScriptObject, str)) and not isinstance(each, bool)]
    size = dist.get_world_size()
    for each in groups:
        try:
            group: Any = c10d._resolve_process_group(each) if isinstance(each, str) else dist.ProcessGroup.unbox(each)
            size = group.size()
            break
        except (RuntimeError, AttributeError, ValueError):
            continue
    tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    if not tensors:
        return 0.0
    if "scatter" in name:  # the largest is the whole
        return max(each.numel() * each.element_size() for each in tensors) * (size - 1) / size
    if "gather" in name:
        least = min(each.numel() * each.element_size() for each in tensors if each.numel())
        return least * (size - 1.0)
    one = tensors[0].numel() * tensors[0].element_size()
    return one * ((size - 1) / size) * (2 if "reduce" in name else 1)


def counted(run: Callable[[], Any]) -> float:
    """Return the bytes that this process sends for the collectives of a call."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    total = [0.0]

    class Count(TorchDispatchMode):
        """Sum of the bytes of every collective."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # DTensor's own collectives reach this function next
            name = func.__name__.partition(".")[0]
            known = func.namespace in ("_c10d_functional", "c10d", "_c10d_functional_autograd")
            if known and any(kind in name for kind in ("gather", "reduce", "scatter", "all_to_all", "alltoall")):
                total[0] += wire_bytes(name, args)
            return func(*args, **(kwargs or {}))

    with Count():
        run()
    return total[0]


def accelerated(file: str, model: Any) -> Any:
    """Return the model as Accelerate prepares it under a configuration file, read as `accelerate launch` does."""
    import torch
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    given = launch_command_parser().parse_args(["--config_file", file, "step.py"])
    launched = prepare_multi_gpu_env(_validate_launch_command(given)[0])
    os.environ |= {key: value for key, value in launched.items() if key.startswith(("FSDP", "ACCELERATE"))}
    accelerator = Accelerator(cpu=True)
    # Accelerate turns FSDP on for accelerators alone.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = (
        DistributedType.FSDP,
        FullyShardedDataParallelPlugin(),
    )
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0]


def prepared(row: dict[str, Any], model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any], int]:
    """Return the model and this process's batch under an export's code, and the number of parts of the batch."""
    if row["form"] == "accelerate":
        import torch.distributed as dist

        parts, own = dist.get_world_size(), dist.get_rank()
        return accelerated(row["code"], model), {name: value.chunk(parts)[own] for name, value in batch.items()}, parts
    code = runpy.run_path(row["code"])
    if row["form"] == "transformers":
        with tempfile.TemporaryDirectory() as folder:
            import torch.distributed as dist

            shared = [folder if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(shared)
            if dist.get_rank() == 0:
                model.save_pretrained(folder)
            dist.barrier()
            split = type(model).from_pretrained(shared[0], distributed_config=code["config"]()).eval()
            dist.barrier()
        parts = code.get("FSDP_SIZE", code.get("DP_REPLICATE_SIZE", 1))
        own = dist.get_rank() // code["TP_SIZE"]
        return split, {name: value.chunk(parts)[own] for name, value in batch.items()}, parts
    mesh = code["make_mesh"]("cpu")
    if row["form"] == "dtensor":
        code["distribute"](model, mesh)
        return model, code["distribute_inputs"](mesh, **batch), 1
    if row["form"] == "fsdp2":
        code["shard"](model, mesh)
        return model, code["local_inputs"](mesh, **batch), mesh["data"].size()
    code["parallelize"](model, mesh)
    if "fsdp" not in code["MESH"]:
        return model, batch, 1
    parts, own = 1, 0
    for axis in (axis for axis in code["MESH"] if axis != "tp"):
        parts, own = parts * mesh[axis].size(), own * mesh[axis].size() + mesh[axis].get_local_rank()
    return model, {name: value.chunk(parts)[own] for name, value in batch.items()}, parts


def clipped(parameters: list[Any]) -> Any:
    """Clip gradients on different meshes as transformers' Trainer does, mesh by mesh; return their norm."""
    import torch

    by_mesh: dict[Any, list[Any]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    norms: list[Any] = [torch.nn.utils.get_total_norm(each) for each in by_mesh.values()]
    total = torch.stack([each.full_tensor() if hasattr(each, "full_tensor") else each for each in norms]).norm()
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, total, foreach=False)
    return total


def step_of(
    model: Any, batch: dict[str, Any], optimizer: Any, by_mesh: bool = False
) -> tuple[Any, Any, dict[str, Any]]:
    """Run one training step; return the loss, the norm of the gradients, and the gradients before clipping.

    `by_mesh` clips as transformers' Trainer does, where torch's own function takes one mesh only.
    """
    import torch
    from torch.distributed.tensor import DTensor

    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    loss = whole(torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten()))
    loss.backward()
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = clipped(list(model.parameters())) if by_mesh else torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), whole(norm), gradients


def run_row(row: dict[str, Any]) -> dict[str, Any]:
    """Run one export in this process, and return its figures."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    import autoshard

    plan = autoshard.load(row["plan"])
    batch = batch_of(plan)
    alone, model = build(row["fields"]), build(row["fields"])
    rate = 1e-2
    loss, norm, gradients = step_of(alone, batch, torch.optim.AdamW(alone.parameters(), lr=rate))
    model, own, parts = prepared(row, model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    found_loss, found_norm, found = step_of(model, own, optimizer, row["form"] == "transformers")
    if parts > 1:
        dist.all_reduce(found_loss)
        found_loss /= dist.get_world_size()
    state = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}
    wanted = alone.state_dict()
    top = max(float(each.abs().max()) for each in gradients.values())
    # AdamW divides gradients by their own size: it turns the smallest into noise.
    seen = {name: each.abs() > 1e-3 * max(float(each.abs().max()), top) for name, each in gradients.items()}
    return {
        "loss": float((found_loss - loss).abs() / loss),
        "norm": float((found_norm - norm).abs() / norm),
        "gradients": max(off(found[name], each, 1e-3 * top) for name, each in gradients.items()),
        "checkpoint": max(
            float((state[name] - wanted[name])[at].abs().max()) / rate for name, at in seen.items() if bool(at.any())
        ),
        "wire_bytes": counted(lambda: step_of_update(model, own, optimizer)),
    }


def step_of_update(model: Any, batch: dict[str, Any], optimizer: Any) -> None:
    """Run loss, backward and update, without gathering anything for a comparison."""
    import torch

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten()).backward()
    optimizer.step()


def work(rank: int, size: int, port: str, rows: list[dict[str, Any]]) -> None:
    """Run all rows in one process of `size`; the first process prints the worst value of all processes."""
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for row in rows:
        torch.manual_seed(1)
        try:
            figures = run_row(row)
        except Exception as error:
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        every: list[Any] = [None] * size
        dist.all_gather_object(every, figures)
        if rank == 0:
            errors = [each["error"] for each in every if "error" in each]
            worst = {key: max(each[key] for each in every if key in each) for key in figures if key != "error"}
            print(json.dumps({"error": errors[0]} if errors else worst), flush=True)
    dist.destroy_process_group()


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())
    import transformers
    import transformers.models.auto.configuration_auto

    import autoshard

    for row in rows:
        getattr(transformers, row["fields"]["architectures"][0])  # imported once, before the fork
    port = str(20000 + os.getpid() % 20000)
    size = math.prod(autoshard.load(rows[0]["plan"]).mesh.values())
    in_forks(size, lambda rank: work(rank, size, port, rows))


if __name__ == "__main__":
    main()
