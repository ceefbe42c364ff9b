"""Script for `test_torch_xla_files.py`: trains a small model and prints its losses and the split of its weights.

`python -m tests.exec.torch_xla_hook.torch_xla_file_steps WIDTH NAME` runs three steps.
"""

import json
import os
import sys


def main() -> None:
    """Train, and print a line of JSON."""
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    import autoshard.torch_xla
    from autoshard.exec.torch_xla_hook.values.lazy_tensors import xlac

    width, name = sys.argv[1:]
    xr.use_spmd(auto=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, int(width)), torch.nn.Tanh(), torch.nn.Linear(int(width), 8))
    model = model.to("xla")
    if os.environ.get("MARKED"):
        import numpy as np
        import torch_xla.distributed.spmd as xs

        xs.mark_sharding(model[0].weight, xs.Mesh(np.arange(4), (2, 2), ("data", "model")), (None, "model"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        drawn = torch.Generator().manual_seed(step)
        x, y = torch.randn(32, 16, generator=drawn), torch.randint(0, 8, (32,), generator=drawn)
        loss = torch.nn.functional.cross_entropy(model(x.to("xla")), y.to("xla"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    made = autoshard.torch_xla.session()
    assert made is not None
    text = xlac()._get_xla_sharding_spec(model[0].weight)
    row = {"losses": losses, "weight": text, "plans": [(plan.program_name, plan.mesh) for plan in made.plans]}
    print("found " + json.dumps({"name": name} | row), flush=True)


if __name__ == "__main__":
    main()
