"""One process of `torch_xla_matrix.py`: train a small model under PyTorch/XLA and print the observations as JSON."""

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--mesh", help="such as 4,2; without it one unsharded device")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--optimizers", nargs="+", default=["momentum", "adamw"])
    parser.add_argument("--reorder", action="store_true", help="the examples of every batch in another order")
    given = parser.parse_args()
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8" if given.mesh else "1")
    os.environ.setdefault("AUTOSHARD_STRICT", "1")
    with tempfile.TemporaryDirectory() as dump:
        if given.mesh:
            os.environ["XLA_AUTO_SPMD_MESH"] = given.mesh
            os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=NONE"
        warnings.simplefilter("ignore")
        import torch_xla.runtime as xr

        if given.mesh:
            import autoshard.torch_xla  # noqa: F401

            xr.use_spmd(auto=True)
        rows = {name: train(given.model, name, given.steps, given.reorder, Path(dump)) for name in given.optimizers}
        print(json.dumps(rows))


def train(model: str, optimizer: str, steps: int, reorder: bool, dump: Path) -> dict[str, Any]:
    """Return the losses of `steps` steps from seed 0, and figures of the compiled programs."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as metrics

    from experiments.lib.programs.torch_xla_models import MODELS
    from experiments.lib.programs.torch_xla_models import optimizer as make_optimizer

    torch.manual_seed(0)
    case = MODELS[model]()
    moved = case.model.to("xla")
    updater = make_optimizer(optimizer, moved.parameters())
    before, dumped = metrics.counter_value("UncachedCompile") or 0, set(dump.glob(EXECUTED))
    losses: list[float] = []
    compiles: list[int] = []
    for _ in range(steps):
        batch = [(value.flip(0) if reorder else value).to("xla") for value in case.batch()]
        updater.zero_grad()
        loss = case.loss(moved, *batch)
        loss.backward()
        updater.step()
        torch_xla.sync()
        losses.append(loss.item())
        compiles.append((metrics.counter_value("UncachedCompile") or 0) - before)
    executed = sorted(set(dump.glob(EXECUTED)) - dumped)
    return {"losses": losses, "compiles": compiles, **planned(moved, updater, executed)}


EXECUTED = "*after_optimizations.txt"
"""Pattern of the files in which XLA dumps executed programs, numbered in the order of compilation."""


def planned(model: Any, optimizer: Any, executed: list[Path]) -> dict[str, Any]:
    """Return the numbers of split parameters and states, and the bytes on the wire, if a plan was made."""
    import sys

    import torch

    hook = sys.modules.get("autoshard.torch_xla")
    if hook is None:
        return {}

    from autoshard.exec import plan_mesh, read_collectives, wire_by_axis
    from autoshard.exec.torch_xla_hook import is_split, sharding_text

    def split(tensor: Any) -> bool:
        return is_split(sharding_text(tensor))

    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
    plan = hook.session().plans[-1]
    mesh = plan_mesh(plan)
    wires = [wire_by_axis(read_collectives(path.read_text(), mesh)) for path in executed]
    return {
        "split_parameters": sum(split(p) for p in model.parameters()),
        "split_states": sum(split(t) for t in states),
        "mesh": plan.mesh,
        "words": plan.words,
        "warnings": plan.warnings,
        "pins": len(plan.pins),
        "solver_gap": plan.solver_gap,
        "wire": {"planned": plan.prediction.wire_bytes, "executed": wires},
    }


if __name__ == "__main__":
    main()
