"""GSPMD's grids of devices as mesh axes, and modules in files that fix specs."""

from pathlib import Path

import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.errors import UserError
from autoshard.exec import measure
from autoshard.planning import Options, make_plan
from autoshard.planning.record.hlo_shardings import tiled_axes
from autoshard.program import open_source


MESH = make_mesh(Topology.parse("cpu:8"), {"data": 4, "model": 2})
CUBE = make_mesh(Topology.parse("cpu:8"), {"x": 2, "y": 2, "z": 2})


@pytest.mark.parametrize(
    "mesh, text, dims",
    [
        (MESH, "{replicated}", ((), ())),
        (MESH, "{devices=[4,2]<=[8]}", ((0,), (1,))),
        (MESH, "{devices=[2,4]<=[4,2]T(1,0)}", ((1,), (0,))),
        (MESH, "{devices=[4,1,2]<=[8] last_tile_dim_replicate}", ((0,), ())),
        (MESH, "{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}", ((), (1,))),
        (MESH, "{devices=[8,1]<=[8]}", ((0, 1), ())),
        (MESH, "{devices=[4,2]0,1,2,3,4,5,6,7}", ((0,), (1,))),
        (MESH, "{devices=[4,1,2]1,0,2,3,4,5,6,7 last_tile_dim_replicate}", ((0,), ())),
        (CUBE, "{devices=[2,2,2]<=[2,2,2]T(0,2,1) last_tile_dim_replicate}", ((0,), (2,))),
        (CUBE, "{devices=[4,1,2]<=[8] last_tile_dim_replicate}", ((0, 1), ())),
    ],
)
def test_a_grid_is_read_as_axes(mesh, text: str, dims) -> None:
    assert tiled_axes(text, 2, mesh, "it") == dims


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "{devices=[2,4]<=[8]}",
            "it asks for {devices=[2,4]<=[8]}, a grid of devices that no axes of the mesh data=4,model=2 give: plan "
            "with a --mesh that has axes of 2 and 4 devices.",
        ),
        (
            "{maximal device=0}",
            "it asks for {maximal device=0}, which no plan over data=4,model=2 can hold: take it out.",
        ),
        ("{manual}", "it asks for {manual}, which no plan over data=4,model=2 can hold: take it out."),
    ],
)  # fmt: skip
def test_what_is_no_grid_of_axes_is_reported(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        tiled_axes(text, 2, MESH, "it")
    assert str(error.value) == said


def module(between: str, kind: str = "tensor<8x32xf32>") -> str:
    return f"""
      module @jit_f {{
        sdy.mesh @mesh = <["data"=4, "model"=2]>
        func.func public @main(%x: tensor<8x16xf32>, %w: tensor<16x32xf32>) -> {kind} {{
          %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
            : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
          %1 = {between}
          %2 = stablehlo.tanh %1 : {kind}
          return %2 : {kind}
        }}
      }}
    """


CALL = 'stablehlo.custom_call @Sharding(%0) {{{}mhlo.sharding = "{}"}} : (tensor<8x32xf32>) -> tensor<8x32xf32>'


@pytest.mark.heavy
@pytest.mark.parametrize(
    "between",
    [
        'sdy.sharding_constraint %0 <@mesh, [{"data"}p1, {}]> : tensor<8x32xf32>',
        CALL.format("", "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"),
    ],
)
def test_a_constraint_in_a_file_holds(between: str, tmp_path: Path) -> None:
    (tmp_path / "step.mlir").write_text(module(between))
    program = open_source(str(tmp_path / "step.mlir"))
    plan = make_plan(program, Options(topology="cpu:8", mesh="data=4,model=2")).plan
    (said,) = plan.provenance["said_by_program"]
    assert said.startswith("with_sharding_constraint at line ")
    assert ("data",) in {pin.spec.dims[0] for pin in plan.pins if pin.operand is None}
    measured = measure(program, plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.passed
    assert sum(measured.wire_compiled.values()) == sum(measured.wire_predicted.values())


@pytest.mark.parametrize(
    "between, said",
    [
        (
            'sdy.sharding_constraint %0 <@mesh, [{"data":(1)2}, {}]> : tensor<8x32xf32>',
            "splits a dim over a part of the axis `data` \\(2 of 4\\): give that part a name of its own in the mesh",
        ),
        (
            CALL.format("", "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"),
            "a grid of devices that no axes of the mesh data=4,model=2 give",
        ),
        (
            'stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} '
            ": (tensor<8x32xf32>) -> tensor<8x32xf32>",
            r"has a region split by hand in GSPMD's form \(SPMDFullToShardShape\)",
        ),
    ],
)
def test_what_a_file_cannot_ask_for_is_reported(between: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "step.mlir").write_text(module(between))
    with pytest.raises(UserError, match=said):
        make_plan(open_source(str(tmp_path / "step.mlir")), Options(topology="cpu:8", mesh="data=4,model=2"))


def test_dims_that_gspmd_leaves_open_stay_free(tmp_path: Path) -> None:
    between = CALL.format('backend_config = "unspecified_dims=[1]", ', "{devices=[4,1,2]<=[8] last_tile_dim_replicate}")
    (tmp_path / "step.mlir").write_text(module(between))
    plan = make_plan(open_source(str(tmp_path / "step.mlir")), Options(topology="cpu:8", mesh="data=4,model=2")).plan
    assert "more allowed on dims 1" in plan.provenance["said_by_program"][0]
