"""Torch modules in segments: their boundaries and their ops."""

import re

import pytest
import torch
from torch import nn

from autoshard import UserError
from autoshard.planning.price.analysed_program import analyse_program
from autoshard.program import NotDividedError, from_torch, in_segments, segment_of
from autoshard.program.segments import asked_segments
from tests.program.torch_modules import Chain, meta


class Twice(nn.Module):
    """One module that is called twice, between two that are called once, with an op before all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.tanh(self.first(x * 2)))
        return self.last(torch.relu(self.again(x)))


def test_a_segment_begins_where_the_outermost_module_does() -> None:
    with in_segments(2) as found:
        program = from_torch(Chain(3), (meta(6, 8), meta(6, 8)), train=True)
    assert found.names == ["layers.0", "layers.0.fc", "layers.1", "layers.1.fc", "layers.2", "layers.2.fc"]
    assert found.may_cut == [True] * 6 and found.batch == 6
    assert [a.shape for a in program.arguments if a.role == "batch"] == [(3, 8), (3, 8)]
    assert asked_segments() is None


def test_ops_and_their_gradients_are_of_one_segment() -> None:
    with in_segments(1):
        program = from_torch(Chain(2), (meta(4, 8), meta(4, 8)), train=True)
    places = {
        (segment_of(op.name), "transpose(" in op.name)
        for op in analyse_program(program, "cpu").graph.ops
        if op.kind == "dot_general"
    }  # fmt: skip
    assert places == {(1, False), (3, False), (1, True), (3, True)}


def test_what_is_called_twice_is_no_place_to_cut() -> None:
    with in_segments(1) as found:
        from_torch(Twice(), (meta(4, 8),))
    assert found.names == ["", "first", "again", "again", "last"]
    assert found.may_cut == [True, True, False, False, True]


def test_microbatches_divide_the_batch() -> None:
    sentence = "4 microbatches do not divide the batch: an input has 6 examples; use 3 microbatches."
    with in_segments(4), pytest.raises(NotDividedError, match=re.escape(sentence)):
        from_torch(Chain(2), (meta(6, 8), meta(6, 8)))
    assert issubclass(NotDividedError, UserError)


def test_without_asking_nothing_is_in_segments() -> None:
    program = from_torch(Chain(2), (meta(4, 8), meta(4, 8)))
    assert all(segment_of(op.name) is None for op in analyse_program(program, "cpu").graph.ops)
    assert any("layers.*" in a.name for a in program.arguments), "layers are scanned"
