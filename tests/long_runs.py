"""Long runs: many plans in one process, and many steps under the PyTorch/XLA hook, with samples of its resources.

`python -m tests.long_runs plans 300` or `steps 2000` prints a line of JSON for each of `SAMPLES` moments.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


SAMPLES = 12
"""Moments of a run at which its resources are sampled, the same number of plans or steps apart."""
CASES = (
    ("v5e:2x2", "data=4", 64),
    ("cpu:8", "data=4,model=2", 96),
    ("v5p:2x2x1", "data=2,model=2", 128),
    ("h100:8", None, 64),
    ("v5e:2x4", None, 192),
)


def held() -> dict[str, int]:
    """Return this process's resources: bytes of memory, open descriptors, threads, temporary files, children."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return {
        "bytes": int(status["VmRSS"].split()[0]) << 10,
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "threads": int(status["Threads"]),
        "files": len(os.listdir(tempfile.gettempdir())),
        "children": len(children.read_text().split()) if children.exists() else 0,
    }


def plans(count: int) -> Iterator[int]:
    """Plan programs that are traced again each time, in turn for different topologies. Yield after each."""
    import jax
    import jax.numpy as jnp

    import autoshard

    for number in range(count):
        topology, mesh, width = CASES[number % len(CASES)]

        def step(params: Any, x: Any) -> Any:
            return jax.grad(lambda params: jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"]))(params)

        shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
        params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        program = autoshard.trace(step, (params, jax.ShapeDtypeStruct((32, width), "float32")))
        plan = autoshard.plan(program, topology=topology, mesh=mesh)
        if number % 50 == 0:
            plan.save(Path(tempfile.gettempdir()) / "plan.json")
        yield number


def steps(count: int) -> Iterator[int]:
    """Train a small model under `xr.use_spmd(auto=True)`. Yield after each step."""
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    import autoshard.torch_xla  # noqa: F401

    xr.use_spmd(auto=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(count):
        batch = torch.randn(32, 64).to("xla")
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        if number % 10 == 0:
            loss.item()
        yield number


RUNS = {"plans": plans, "steps": steps}


def main() -> None:
    kind, count = sys.argv[1], int(sys.argv[2])
    every = max(1, count // SAMPLES)
    for number in RUNS[kind](count):
        if (number + 1) % every == 0:
            print(json.dumps({"number": number + 1, **held()}), flush=True)


if __name__ == "__main__":
    main()
