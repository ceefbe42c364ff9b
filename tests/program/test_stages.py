"""Layers of torch modules, of configurations and of decoders built from dims, as stages of a pipeline."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch_modules import Chain, Layer, meta

from autoshard import program
from autoshard.errors import UserError
from autoshard.graph import read_graph
from autoshard.program import DecoderDims, Pipeline, decoder_program, from_torch, open_source


FULL = pytest.mark.full


def agree(plain: Any, staged: Any) -> None:
    """Compare loss, gradients (from the state of momentum) and updates of two programs with the same arguments."""
    args = plain.make_args(0)
    given = [own_part(plain.arguments, jax.tree.leaves(args), each.name) for each in staged.arguments]
    wanted = jax.tree.leaves(jax.jit(plain.fn)(*args))
    results = jax.tree.leaves(jax.jit(staged.fn)(*jax.tree.unflatten(jax.tree.structure(staged.args), given)))
    assert staged.model_flops == pytest.approx(plain.model_flops)
    for result, b in zip(staged.results, results, strict=True):
        a, b = np.asarray(own_part(plain.results, wanted, result.name)), np.asarray(b)
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * max(abs(a).max(), 1e-6))


def own_part(named: Any, values: Any, name: str) -> Any:
    """Return the value under a name, which may name some layers of a stack or a value of its own."""
    known = {each.name: value for each, value in zip(named, values, strict=True)}
    if name in known:
        return known[name]
    some = re.search(r"\[(\d+):(\d*)\]|(?<=\.)(\d+)(?=\.)", name)
    assert some is not None
    whole = known[f"{name[: some.start()]}*{name[some.end() :]}"]
    first, last, one = some.groups()
    return whole[int(one)] if one else whole[int(first) : int(last) if last else None]


class Attending(nn.Module):
    """Layers with inputs from the batch, which must not become their parameters, and a table."""

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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    [pytest.param(2, 4, "gpipe", marks=FULL), (2, 2, "circular"), (3, 4, "gpipe")],
)
def test_what_belongs_to_the_batch_goes_along_with_it(stages: int, microbatches: int, schedule: str) -> None:
    # as many tokens as examples: the shapes do not show what belongs to the batch
    inputs = (meta(4, 4, 8), meta(4, 16))
    options: dict[str, Any] = {"train": True, "optimizer": "momentum"}
    plain = from_torch(Attending(), inputs, **options)
    staged = from_torch(Attending(), inputs, **options, stages=stages, microbatches=microbatches, schedule=schedule)
    agree(plain, staged)
    assert ("layers.0.fc.weight" in staged.args[0]) == (stages == 3) and staged.stacks == (4,)
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
    # The recomputed FLOPs are the same: two of 2 + 1 ticks compute values that are used.
    assert read_graph(staged.module).flops < 1.5 * read_graph(plain.module).flops


def test_a_forward_pass_goes_through_stages_too() -> None:
    program = open_source("hf:llama-tiny", batch=4, seq=16, stages=2)
    assert rolls(program) and program.results[0].shape == (4, 16, 256)


def test_layers_that_are_left_over_come_before_the_stages(tmp_path: Path) -> None:
    config = json.loads((Path(program.__file__).parent / "configs" / "llama-tiny.json").read_text())
    (tmp_path / "llama.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    options: dict[str, Any] = {"train": True, "batch": 4, "seq": 16, "dtype": "float32", "optimizer": "momentum"}
    plain, staged = (
        open_source(f"hf:{tmp_path / 'llama.json'}", **options, remat="full", stages=stages, microbatches=count)
        for stages, count in ((None, None), (3, 2))
    )
    agree(plain, staged)
    assert any("2 of 5 layers before them" in note for note in staged.notes)
    names = [each.name for each in staged.arguments if "q_proj" in each.name and "optimizer" not in each.name]
    assert names == [f"model.layers.{part}.self_attn.q_proj.weight" for part in ("[0:2]", "[2:]")]


DIMS = DecoderDims(4, 32, 64, 4, 2, 8, 64)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "stages", "schedule"),
    [(5, 2, "circular"), *(pytest.param(*case, marks=FULL) for case in ((4, 2, "circular"), (5, 2, "gpipe")))],
)
def test_a_decoder_from_its_dims_is_the_same_in_stages(layers: int, stages: int, schedule: str) -> None:
    options: dict[str, Any] = {"batch": 4, "seq": 8, "attention": "plain", "compute_dtype": "float32"}
    options |= {"optimizer": "momentum", "remat": "minimal"}
    dims = dataclasses.replace(DIMS, layers=layers)
    agree(decoder_program(dims, **options), decoder_program(dims, **options, pipeline=Pipeline(stages, 2, schedule)))


def test_kernels_work_for_all_stages() -> None:
    """Call attention once for all stages. Its FLOPs grow by the share of unused ticks."""
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
        (Chain(), {"stages": 5}, "5 stages are more than the 4 layers of `layers`; use 4 or fewer, or none."),
        (Chain(), {"stages": 2, "microbatches": 5}, "5 microbatches do not divide the batch: `x` has 8 examples."),
        (nn.Linear(8, 8), {"stages": 2}, "`Linear` has no layers that repeat, so it cannot be cut into 2 stages;"),
        (Chain(scales=[1, 2, 3, 4]), {"stages": 2}, "`Chain` has no layers that repeat, so it cannot be cut into 2"),
    ],
)
def test_what_cannot_be_is_reported(module: Any, how: Any, sentence: str) -> None:
    inputs = (meta(8, 8),) if isinstance(module, nn.Linear) else (meta(8, 8), meta(1, 8))
    with pytest.raises(UserError, match=re.escape(sentence)):
        from_torch(module, inputs, train=True, **how)


def test_serving_has_no_stages() -> None:
    with pytest.raises(UserError, match="--stages is for training steps and forward passes"):
        open_source("hf:llama-tiny", serve="decode", stages=2)


def test_state_on_the_hosts_has_no_stages() -> None:
    with pytest.raises(UserError, match="--host optimizer updates state in a loop over layers, and layers in 2 stages"):
        open_source("hf:llama-tiny", train=True, batch=4, seq=16, stages=2, host="optimizer")
