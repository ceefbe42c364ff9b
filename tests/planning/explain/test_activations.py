"""Words of a plan about the values between a torch module's layers."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.planning.explain.module_uses import torch_function
from autoshard.program import from_torch


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("jit(step)/jvp(aten::add.Tensor)/add", "add"),
        ("jit(forward)/while/body/closed_call/layer_norm/mul", "layer_norm"),
        ("jit(forward)/__getitem__/slice", "getitem"),
        ("jit(step)/jvp(aten::transpose.int)/transpose", "transpose"),
        ("jit(step)/transpose(jvp(aten::add.Tensor))/add", ""),
        ("jit(step)/jvp()/while/body/closed_call/reshape", ""),
        ("jit(forward)/while/body/jit(_where)/select_n", ""),
        ("add", ""),
        ("", ""),
    ],
)
def test_an_op_is_of_a_function_of_torch(name: str, function: str) -> None:
    assert torch_function(name) == function


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return torch.tanh(torch.relu(self.up(x)) * 2) @ self.down.weight.T + torch.tanh(x)


def test_only_what_is_split_alike_is_reported_and_a_file_keeps_it(tmp_path) -> None:
    program = from_torch(Net(), torch.zeros(8, 4, 16), train=True)
    (batch,) = (argument.name for argument in program.arguments if argument.role == "batch")
    pins = {batch: "None,None,None", "up.weight": "model,None", "down.weight": "None,model"}
    plan = autoshard.plan(program, topology="cpu:2", mesh={"model": 2}, pins=pins)
    found = {(each.function, each.shape): each.spec.dims for each in plan.activations}
    assert found["relu", (8, 4, 64)] == found["mul", (8, 4, 64)] == found["tanh", (8, 4, 64)] == ((), (), ("model",))
    assert found["tanh", (8, 4, 16)] == ((), (), ())
    assert not any("transpose" in function for function, _ in found), "gradients are no part of it"
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").activations == plan.activations
