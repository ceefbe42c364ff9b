"""Values that layers store between the loops of a step, compared with the tensors that eager torch saves."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch.nn import functional

from autoshard.program.jax.jaxprs import equations
from autoshard.program.torch.torch_module import from_torch


LAYERS, WIDTH, TOKENS = 3, 32, 12


class Block(torch.nn.Module):
    """A layer with a norm and a function between two matmuls, either of which may be frozen."""

    def __init__(self, norm: torch.nn.Module, act: Callable[..., Any], frozen: bool) -> None:
        super().__init__()
        self.norm, self.act = norm, act
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        if frozen:
            self.requires_grad_(False)
            self.down.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def stored(program: Any) -> int:
    """Return the bytes of the values that the first loop stacks for the second one."""
    jaxpr = jax.make_jaxpr(program.fn)(*program.args).jaxpr
    loop = next(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    stacks = [v.aval for v in loop.outvars[loop.params["num_carry"] :]]
    return sum(each.size * each.dtype.itemsize for each in stacks)


def saved(module: torch.nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that eager torch saves for the backward pass, without parameters."""
    sizes: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in module.parameters()}
    alive: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    out.sum().backward()
    return sum(sizes.values())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("norm", "act"),
    [
        ("layer", functional.gelu),
        ("layer", lambda x: functional.gelu(x, approximate="tanh")),
        ("rms", functional.silu),
        ("none", functional.softplus),
        ("none", lambda x: functional.silu(x) * x),
    ],
)
def test_layers_store_what_eager_torch_saves(norm: str, act: Callable[..., Any], frozen: bool) -> None:
    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        kinds = {"layer": torch.nn.LayerNorm, "rms": torch.nn.RMSNorm}
        norms = [kinds[norm](WIDTH) if norm in kinds else torch.nn.Identity() for _ in range(LAYERS)]
        return torch.nn.Sequential(*(Block(each, act, frozen) for each in norms))

    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    program = from_torch(made(), (x,), train=True, optimizer="sgd", loss=torch.sum)
    assert stored(program) <= saved(made(), x.requires_grad_())
