"""Layers of torch modules, of configurations and of decoders from their dims as stages of a pipeline."""

import re
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch_modules import Chain, Layer, meta

from autoshard.errors import UserError
from autoshard.graph import read_graph
from autoshard.program import DecoderDims, Pipeline, decoder_program, from_torch, open_source


def agree(plain: Any, staged: Any) -> None:
    """Loss, gradients (which the state of momentum holds) and updates of two programs with the same arguments."""
    args = plain.make_args(0)
    wanted, found = (jax.tree.leaves(jax.jit(p.fn)(*args)) for p in (plain, staged))
    assert staged.model_flops == pytest.approx(plain.model_flops)
    for a, b in zip(wanted, found, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * max(abs(a).max(), 1e-6))


class Attending(nn.Module):
    """Layers that are given something of the batch, which they may not take for their own, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(8) for _ in range(4))
        self.table = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Any, beside: Any) -> Any:
        x = self.first(x)
        beside = beside.reshape(beside.shape[0], 2, 8).sum(1, keepdim=True) + self.table
        for layer in self.layers:
            x = layer(x, beside)
        return x


@pytest.mark.parametrize(("microbatches", "schedule"), [(4, "gpipe"), (2, "circular")])
def test_what_belongs_to_the_batch_goes_along_with_it(microbatches: int, schedule: str) -> None:
    inputs = (meta(4, 4, 8), meta(4, 16))  # as many tokens as examples: shapes do not tell what belongs to the batch
    options: dict[str, Any] = {"train": True, "optimizer": "momentum"}
    plain = from_torch(Attending(), inputs, **options)
    staged = from_torch(Attending(), inputs, **options, stages=2, microbatches=microbatches, schedule=schedule)
    agree(plain, staged)
    assert not any("not scanned" in note for note in staged.notes)


class Tabled(Attending):
    def forward(self, x: Any, beside: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, self.table)
        return x + beside.mean()


def test_a_table_with_as_many_rows_as_the_batch_stays_whole() -> None:
    inputs = (meta(4, 4, 8), meta(4, 16))
    options: dict[str, Any] = {"train": True, "optimizer": "momentum"}
    agree(from_torch(Tabled(), inputs, **options), from_torch(Tabled(), inputs, **options, stages=4, microbatches=4))


def rolls(program: Any) -> int:
    return sum(op.kind == "rotate" for op in read_graph(program.module).ops)


def test_a_configuration_is_trained_in_stages() -> None:
    remat = "dots"
    options: dict[str, Any] = {"train": True, "batch": 4, "seq": 16, "dtype": "float32", "optimizer": "momentum"}
    plain = open_source("hf:llama-tiny", **options, remat=remat)
    staged = open_source("hf:llama-tiny", **options, remat=remat, stages=2, microbatches=2)
    agree(plain, staged)
    assert not rolls(plain) and rolls(staged)
    # What is computed again is the same: of 2 + 1 ticks two compute what is used.
    assert read_graph(staged.module).flops < 1.5 * read_graph(plain.module).flops


def test_a_forward_pass_goes_through_stages_too() -> None:
    program = open_source("hf:llama-tiny", batch=4, seq=16, stages=2)
    assert rolls(program) and program.results[0].shape == (4, 16, 256)


DIMS = DecoderDims(4, 32, 64, 4, 2, 8, 64)


def test_a_decoder_from_its_dims_is_the_same_in_stages() -> None:
    options: dict[str, Any] = {"batch": 4, "seq": 8, "attention": "plain", "compute_dtype": "float32"}
    options |= {"optimizer": "momentum", "remat": "minimal"}
    plain = decoder_program(DIMS, **options)
    agree(plain, decoder_program(DIMS, **options, pipeline=Pipeline(2, 2, "circular")))


def test_kernels_work_for_all_stages() -> None:
    """Attention of all stages is one call, with as many more FLOPs as there are ticks that nobody uses."""
    plain = read_graph(decoder_program(DIMS, batch=8, seq=64).module)
    staged = read_graph(decoder_program(DIMS, batch=8, seq=64, pipeline=Pipeline(2, 8)).module)
    for kind in ("attention", "attention_backward"):
        alone, together = ([op for op in graph.ops if op.kind == kind] for graph in (plain, staged))
        assert len(alone) == len(together) > 0
        more = [sum(op.flops * g.trips(op.loop) for op in o) for g, o in ((plain, alone), (staged, together))]
        assert more[1] == pytest.approx(more[0] * 9 / 8)
        assert all(len(op.rule.operands[0]) == 6 for op in together if op.rule is not None)


@pytest.mark.parametrize(
    ("module", "how", "sentence"),
    [
        (Chain(), {"stages": 3}, "3 stages do not divide the 4 layers of `layers`; use 2, 4 stages, or none."),
        (Chain(), {"stages": 5}, "5 stages are more than the 4 layers of `layers`; use 2, 4 stages, or none."),
        (Chain(), {"stages": 2, "microbatches": 5}, "5 microbatches do not divide the batch: `x` has 8 examples."),
        (nn.Linear(8, 8), {"stages": 2}, "`Linear` has no layers that repeat, so it cannot be cut into 2 stages;"),
        (Chain(scales=[1, 2, 3, 4]), {"stages": 2}, "`Chain` has no layers that repeat, so it cannot be cut into 2"),
    ],
)
def test_what_cannot_be_is_said(module: Any, how: Any, sentence: str) -> None:
    inputs = (meta(8, 8),) if isinstance(module, nn.Linear) else (meta(8, 8), meta(1, 8))
    with pytest.raises(UserError, match=re.escape(sentence)):
        from_torch(module, inputs, train=True, **how)


def test_serving_has_no_stages() -> None:
    with pytest.raises(UserError, match="--stages is for training steps and forward passes"):
        open_source("hf:llama-tiny", serve="decode", stages=2)


def test_state_on_the_hosts_has_no_stages() -> None:
    with pytest.raises(UserError, match="--host optimizer updates state in a loop over layers, and layers in 2 stages"):
        open_source("hf:llama-tiny", train=True, batch=4, seq=16, stages=2, host="optimizer")
