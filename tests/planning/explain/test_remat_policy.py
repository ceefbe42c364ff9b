"""Remat policy of a plan for layers that are written in JAX or in torch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import UserError
from autoshard.graph import analyse, read_graph
from autoshard.planning import Options, Plan, make_plan
from autoshard.program import trace
from tests.graph.programs import f32


@pytest.fixture(scope="module")
def plain() -> Plan:
    program = trace(lambda w, x: x @ w, (f32(64, 64), f32(64, 64)), name="toy")
    return make_plan(program, Options(topology="v5e:2x4", mesh="data=8")).plan


def having(plan: Plan, remat: Any) -> Plan:
    return dataclasses.replace(plan, provenance=plan.provenance | {"source": {"options": {"remat": remat}}})


def kept(policy: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the shapes that JAX layers save under a policy: on the device, and on the host."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        inner = checkpoint_name(checkpoint_name(x, "input") @ w[0], "query")
        return x + jnp.tanh(inner) @ w[1], None

    def loss(w: Any, x: Any) -> Any:
        body = layer if policy is None else jax.checkpoint(layer, policy=policy)
        return (jax.lax.scan(body, x, w)[0] ** 2).mean()

    weights = f32(3, 16, 48), f32(3, 48, 16)
    graph = read_graph(trace(jax.grad(loss), (weights, f32(8, 16)), name="layers").module)
    away = analyse(graph).hosted
    stacks = [op.results[0] for op in graph.ops if op.kind == "dynamic_update_slice" and "transpose" not in op.name]
    return (
        sorted(graph.tensors[t].shape for t in stacks if t not in away),
        sorted(graph.tensors[t].shape for t in stacks if t in away),
    )


def test_layers_in_jax_keep_what_the_plan_says(plain: Plan) -> None:
    names = {"q_proj": "query"}
    policy = autoshard.remat_policy(having(plain, "full,keep=q_proj,offload=input"), names=names)
    assert kept(policy) == ([(3, 8, 48)], [(3, 8, 16)])
    own = autoshard.remat_policy(having(plain, "full,offload=query"))
    assert kept(own) == ([(3, 8, 16)], [(3, 8, 48)])
    assert kept(autoshard.remat_policy(having(plain, "full"))) == ([(3, 8, 16)], [])
    assert autoshard.remat_policy(having(plain, "none")) is None


def test_what_was_chosen_goes_before_what_was_asked(plain: Plan) -> None:
    chosen = {"recipe": {"chosen": {"remat": "full,keep=query"}}, "source": {"options": {"remat": "full"}}}
    policy = autoshard.remat_policy(dataclasses.replace(plain, provenance=chosen))
    assert kept(policy) == ([(3, 8, 16), (3, 8, 48)], [])


def test_a_mixture_has_a_policy_for_each_layer(plain: Plan) -> None:
    plan = having(plain, "full,keep=query:2+full")
    assert kept(autoshard.remat_policy(plan, layer=1))[0] == [(3, 8, 16), (3, 8, 48)]
    assert kept(autoshard.remat_policy(plan, layer=2))[0] == [(3, 8, 16)]
    with pytest.raises(UserError, match="another policy for its first layers .* ask for one by `layer=`"):
        autoshard.remat_policy(plan)


def test_a_plan_without_a_policy_says_so(plain: Plan) -> None:
    with pytest.raises(UserError, match="does not say what its layers compute again"):
        autoshard.remat_policy(plain)
    with pytest.raises(UserError, match="`names` has `up`, but the plan's policy .* names q_proj"):
        autoshard.remat_policy(having(plain, "full,keep=q_proj"), names={"up": "mlp"})


def test_layers_in_torch_keep_what_the_plan_says(plain: Plan) -> None:
    """Check the names only: `tests/program/test_torch_policy.py` checks which results the contexts save."""
    layer = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4), "wk": torch.nn.Linear(4, 4)})
    plan = having(plain, "full,keep=q_proj/k_proj:2+none")
    x = torch.ones(2, 4, requires_grad=True)
    contexts = autoshard.torch_remat_policy(plan, layer, names={"k_proj": "wk"}, layer=1)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer["wk"](torch.tanh(layer["q_proj"](x))))

    checkpoint(run, x, use_reentrant=False, context_fn=contexts).sum().backward()
    found, x.grad = x.grad, None
    run(x).sum().backward()
    assert torch.equal(found, x.grad)  # type: ignore[arg-type]
    assert autoshard.torch_remat_policy(plan, layer, names={"k_proj": "wk"}, layer=2) is None
    with pytest.raises(
        UserError, match="names `k_proj`, which is no value of `ModuleDict`: its layers have q_proj, wk"
    ):
        autoshard.torch_remat_policy(plan, layer, layer=0)
    with pytest.raises(UserError, match="ask for one by `layer=`"):
        autoshard.torch_remat_policy(plan, layer)
