"""Norms on the XLA device as sums and products, and ELU: values, gradients and statistics are PyTorch's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


WORKER = """
import copy, json
import torch, torch_xla
from autoshard.exec.torch_xla_hook.values.device_kernels import expand_norms, replace_lowerings
from autoshard.exec.torch_xla_hook.values.lazy_tensors import xlac
from torch import nn

expand_norms()
replace_lowerings()
torch.manual_seed(0)

def off(ours, theirs):
    ours, theirs = ours.detach().cpu().double(), theirs.detach().double()
    return float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-30)

NETS = [
    (nn.LayerNorm(8), (4, 5, 8)),
    (nn.BatchNorm2d(3), (4, 3, 8, 8)),
    (nn.BatchNorm1d(7, momentum=0.3), (9, 7)),
    (nn.BatchNorm2d(3, affine=False, track_running_stats=False), (4, 3, 8, 8)),
    (nn.GroupNorm(2, 6), (4, 6, 8)),
    (nn.InstanceNorm1d(3, affine=True), (4, 3, 8)),
    (nn.ELU(0.7), (4, 8)),
    (nn.CELU(0.7), (4, 8)),
    (nn.ELU(0.7, inplace=True), (4, 8)),
    (nn.SELU(), (4, 8)),
]
found = []
for net, shape in NETS:
    for training in (True, False):
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        ours, theirs = copy.deepcopy(net).train(training).to("xla"), copy.deepcopy(net).train(training)
        x = torch.randn(shape)
        a, b = x.to("xla").requires_grad_(), x.clone().requires_grad_()
        values = [(ours(a * 1), theirs(b * 1))]  # in place on a leaf is refused
        for value in values[0]:
            (value**3).sum().backward()
        values.append((a.grad, b.grad))
        values += [(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters())]
        values += list(zip(ours.buffers(), theirs.buffers()))
        text = xlac()._get_xla_tensors_text([values[0][0], a.grad])
        found.append([type(net).__name__, training, max(off(*pair) for pair in values), "batch_norm" in text])
rough = nn.LayerNorm(64).to(torch.bfloat16)
x = torch.randn(16, 64, dtype=torch.bfloat16) + 100
given = copy.deepcopy(rough).to("xla")(x.to("xla"))
exact = nn.functional.layer_norm(x.double(), (64,))
found.append(["bfloat16", str(given.dtype), float((given.cpu().double() - exact).abs().max()), False])
print("found " + json.dumps(found))
"""


@pytest.mark.full
def test_norms_are_sums_and_products_with_pytorchs_values():
    root = Path(__file__).parents[3]
    process = subprocess.run(
        [sys.executable, "-c", WORKER],
        capture_output=True,
        text=True,
        env=os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "PYTHONPATH": str(root)},
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("found ")]
    assert lines, process.stderr[-2000:]
    *found, rough = json.loads(lines[0].removeprefix("found "))
    assert len(found) == 20
    assert [row for row in found if row[2] > 2e-6 or row[3]] == []
    assert rough[1] == "torch.bfloat16" and rough[2] < 0.02
