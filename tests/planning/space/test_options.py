"""Options of a plan: one record, equal for every way in which users write them."""

import dataclasses
import inspect
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import autoshard
from autoshard.cli import inputs, parser
from autoshard.errors import UserError
from autoshard.planning import Options, PlanOptions, make_plan, plan_any, read_asked, read_options
from tests.planning import programs


def test_what_is_left_out_has_its_default():
    assert read_options("cpu:8", {}) == Options(topology="cpu:8")
    assert read_options("cpu:8", {"mesh": "data=8", "seed": 3}) == Options(topology="cpu:8", mesh="data=8", seed=3)


def test_demands_are_read_into_one_record():
    read = read_options("cpu:8", {"pins": {"up": "data,None"}, "replicate": ["bias"]})
    assert read.asked == read_asked({"up": "data,None"}, ["bias"])
    assert read == read_options("cpu:8", {"asked": read.asked})
    with pytest.raises(TypeError, match="leave out pins"):
        read_options("cpu:8", {"asked": read.asked, "pins": {"up": "data,None"}})


def test_what_is_no_plan_pins_nothing():
    with pytest.raises(UserError, match="pin_from is 5; give a plan, or the path of one"):
        read_options("cpu:8", {"pin_from": 5})  # type: ignore[typeddict-item]


@pytest.mark.parametrize("kind", [float, np.float32, np.int64, Fraction])
def test_a_limit_of_memory_is_rounded_down_to_bytes(kind: type, tmp_path: Path):
    """Plan with a limit that binds, and save the plan, which stores the limit."""
    program = programs.program("matmul")
    free = autoshard.plan(program, topology="cpu:8", mesh="data=8").prediction.peak_bytes
    limit = kind(free - 1) + (0 if kind is np.int64 else kind(0.5))
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=8", memory_limit=limit, seed=np.int64(1))
    assert plan.prediction.peak_bytes <= plan.memory_limit_bytes == int(limit)
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").memory_limit_bytes == int(limit)
    with pytest.raises(UserError, match="memory_limit is 0.5, expected the bytes of one device, a number from 1 up"):
        read_options("cpu:8", {"memory_limit": 0.5})


def test_an_option_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="no option 'meshes'; the options of a plan are topology, asked,"):
        autoshard.plan(programs.program("matmul"), topology="cpu:8", meshes="data=8")  # pyrefly: ignore[bad-argument-type]


def test_every_option_can_be_stated_everywhere():
    """Compare the options' record with the options of `autoshard.plan`, of `refine` and of the command."""
    demands = {"pins", "replicate", "forbid", "axis_only", "pin_from"}
    fields = {field.name for field in dataclasses.fields(Options)}
    assert fields == set(PlanOptions.__annotations__) - demands | {"topology"}
    own = {"topology", "asked", "ignore_constraints"}  # parsed by their own code
    assert set(inputs.PLANNING) == fields - own
    arguments = vars(parser.build_parser().parse_args(["plan", "hf:gpt2", "--topology", "cpu:8"]))
    assert fields - {"asked"} <= set(arguments)
    for function in (autoshard.plan, autoshard.refine):
        assert "options" in inspect.signature(function).parameters


def test_a_source_is_opened_with_its_options():
    said = {"batch": 8, "seq": 16, "train": True}
    plan = autoshard.plan("hf:gpt2-tiny", topology="cpu:8", mesh="data=8", program_options=said)
    assert plan.shapes["batch.input_ids"] == (8, 16)
    with pytest.raises(UserError, match=r"program_options \(batch\) are for a source such as"):
        autoshard.plan(programs.program("matmul"), topology="cpu:8", program_options={"batch": 8})


@pytest.mark.full
def test_remat_is_chosen_from_python_as_by_the_command(tmp_path: Path):
    """Choose remat for a source and for a function that makes the program. The plan lists each variant's outcome."""
    said = {"batch": 8, "seq": 16, "train": True}
    options = Options(topology="v5e:2x4", mesh="data=8", time_limit=20)
    plan = autoshard.plan(
        "hf:gpt2-tiny", topology="v5e:2x4", mesh="data=8", time_limit=20, program_options={**said, "remat": "auto"}
    )
    assert set(plan.provenance["remat"]) == {"none", "dots", "full"}

    made: list[str] = []

    def make(remat: str) -> autoshard.Program:
        made.append(remat)
        from autoshard.program import open_source

        return open_source("hf:gpt2-tiny", **said, remat=remat)

    assert plan_any(make, options).plan.arguments == plan.arguments
    assert made == ["none", "dots", "full"]
    alone = make_plan(make("none"), options).plan
    assert plan.prediction.step_time_s <= alone.prediction.step_time_s
