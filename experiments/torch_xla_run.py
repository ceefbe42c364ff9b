"""One process of `torch_xla_matrix.py`: train a small model under PyTorch/XLA and print what was seen, as JSON."""

import argparse
import json
import os
import warnings
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--mesh", help="such as 4,2; without it one unsharded device")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--optimizers", nargs="+", default=["momentum", "adamw"])
    given = parser.parse_args()
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8" if given.mesh else "1")
    os.environ.setdefault("AUTOSHARD_STRICT", "1")
    if given.mesh:
        os.environ["XLA_AUTO_SPMD_MESH"] = given.mesh
    warnings.simplefilter("ignore")
    import torch_xla.runtime as xr

    if given.mesh:
        import autoshard.torch_xla  # noqa: F401

        xr.use_spmd(auto=True)
    print(json.dumps({name: train(given.model, name, given.steps) for name in given.optimizers}))


def train(model: str, optimizer: str, steps: int) -> dict[str, Any]:
    """Losses of `steps` steps from seed 0, and what was compiled for them."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as metrics

    from experiments.torch_xla_models import MODELS
    from experiments.torch_xla_models import optimizer as make_optimizer

    torch.manual_seed(0)
    case = MODELS[model]()
    moved = case.model.to("xla")
    updater = make_optimizer(optimizer, moved.parameters())
    before = metrics.counter_value("UncachedCompile") or 0
    losses: list[float] = []
    compiles: list[int] = []
    for _ in range(steps):
        batch = [value.to("xla") for value in case.batch()]
        updater.zero_grad()
        loss = case.loss(moved, *batch)
        loss.backward()
        updater.step()
        torch_xla.sync()
        losses.append(loss.item())
        compiles.append((metrics.counter_value("UncachedCompile") or 0) - before)
    return {"losses": losses, "compiles": compiles, **planned(moved, updater)}


def planned(model: Any, optimizer: Any) -> dict[str, Any]:
    """How many parameters and states are split, if a plan was made."""
    import sys

    import torch

    hook = sys.modules.get("autoshard.torch_xla")
    if hook is None:
        return {}

    from autoshard.exec.torch_xla_hook import held_spec, is_split

    def split(tensor: Any) -> bool:
        return is_split(held_spec(tensor))

    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
    plan = hook.session().plans[-1]
    return {
        "split_parameters": sum(split(p) for p in model.parameters()),
        "split_states": sum(split(t) for t in states),
        "mesh": plan.mesh,
        "words": plan.words,
        "warnings": plan.warnings,
        "pins": len(plan.pins),
        "solver_gap": plan.solver_gap,
    }


if __name__ == "__main__":
    main()
