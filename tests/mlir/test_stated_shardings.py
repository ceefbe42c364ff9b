"""Meshes and shardings that a module states, with all that Shardy's notation allows."""

from typing import Any

import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from autoshard import mlir
from autoshard.mlir import AxisUse, Sharding


MESH = (("a", 2), ("b", 4), ("c", 2))
NAMED = {"mesh": MESH, "my mesh, [1]": (("x y", 4), ('q"t', 2), ("p:(1)2", 2))}


def parsed(text: str) -> Any:
    return ir.Attribute.parse(text, mlir.new_context())


def whole(*names: str) -> tuple[AxisUse, ...]:
    return tuple(map(AxisUse, names))


@pytest.mark.parametrize(
    ("text", "sharding"),
    [
        ('@mesh, [{"a"}, {}]', Sharding((whole("a"), ()), (False, False), mesh=MESH)),
        (
            '@mesh, [{"a", "b", ?}p1, {?}p0], replicated={"c"}',
            Sharding((whole("a", "b"), ()), (True, True), whole("c"), mesh=MESH),
        ),
        ("@mesh, []", Sharding((), (), mesh=MESH)),
        ("@other, [{?}]", Sharding(((),), (True,))),
        (
            '@mesh, [{"b":(2)2}, {"b":(1)2, ?}], replicated={"a"}, unreduced={"c"}',
            Sharding(
                ((AxisUse("b", (2, 2)),), (AxisUse("b", (1, 2)),)), (False, True), whole("a"), whole("c"), mesh=MESH
            ),
        ),
        (
            '@"my mesh, [1]", [{"x y"}, {"q\\22t", ?}p2, {"p:(1)2"}]',
            Sharding(
                (whole("x y"), whole('q"t'), whole("p:(1)2")), (False, True, False), mesh=NAMED["my mesh, [1]"]
            ),
        ),
        ('@mesh, [{"}, {", "]>"}, {"?"}]', Sharding((whole("}, {", "]>"), whole("?")), (False, False), mesh=MESH)),
        ('@mesh, [{}], unreduced={"}"}', Sharding(((),), (False,), (), whole("}"), mesh=MESH)),
        ('mesh<["in line"=4]>, [{"in line"}]', Sharding((whole("in line"),), (False,), mesh=(("in line", 4),))),
    ],
)  # fmt: skip
def test_shardings_are_read_as_shardy_reads_them(text: str, sharding: Sharding) -> None:
    assert mlir.stated_sharding(parsed(f"#sdy.sharding<{text}>"), NAMED) == sharding
    several = parsed(f"#sdy.sharding_per_value<[<{text}>, <@mesh, []>, <{text}>]>")
    assert mlir.shardings_of_values(several, NAMED) == [sharding, Sharding((), (), mesh=MESH), sharding]


@pytest.mark.parametrize(
    ("text", "free"),
    [
        ("[{?}, {?}p1]", True),
        ("[{?}, {}]", False),
        ('[{?}], replicated={"a"}', False),
        ('[{?}], unreduced={"a"}', False),
    ],
)
def test_a_sharding_that_demands_nothing_is_free(text: str, free: bool) -> None:
    assert mlir.stated_sharding(parsed(f"#sdy.sharding<@mesh, {text}>"), NAMED).is_free is free


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("@one, [{}]", True),
        ('mesh<["a"=1, "b"=1]>, [{"a"}]', True),
        ("mesh<[], device_ids=[3]>, [{}]", True),  # one device
        ('@"two = 1", [{}]', False),
        ('mesh<["a"=1, "b =1"=2]>, [{"a"}]', False),
        ("@unknown, [{}]", False),
    ],
)
def test_a_sharding_on_one_device_is_idle(text: str, idle: bool) -> None:
    meshes = {"one": (("a", 1), ("b=7", 1)), "two = 1": (("a", 2),)}
    assert mlir.is_idle(parsed(f"#sdy.sharding<{text}>"), meshes) is idle


@pytest.mark.parametrize("attribute", [None, '"{devices=[2,1]<=[2]}"'])
def test_a_sharding_without_a_mesh_is_not_idle(attribute: str | None) -> None:
    assert not mlir.is_idle(attribute and parsed(attribute), {"mesh": ()})


SOURCE = """
sdy.mesh @"my mesh, [1]" = <["x y"=4, "q\\22t"=2]>
sdy.mesh @order = <["a"=2, "b"=2], device_ids=[3, 1, 2, 0]>
func.func @main(
    %x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@"my mesh, [1]", [{"x y"}, {"q\\22t"}]>},
    %y: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = sdy.sharding_constraint %x <@"my mesh, [1]", [{"x y":(1)2}p3, {?}], replicated={"q\\22t"}> : tensor<8x4xf32>
  %1 = sdy.manual_computation(%0, %y) in_shardings=[<@"my mesh, [1]", [{"x y"}, {}]>, <@"my mesh, [1]", [{}, {}]>]
    out_shardings=[<@"my mesh, [1]", [{"x y"}, {}]>] manual_axes={"x y", "q\\22t"}
    (%a: tensor<2x4xf32>, %b: tensor<8x4xf32>) {
      sdy.return %a : tensor<2x4xf32>
    } : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}
"""


def test_meshes_axes_and_regions_of_a_module() -> None:
    module = mlir.parse_module(SOURCE)
    meshes = mlir.meshes_of(module)
    assert meshes == {"my mesh, [1]": (("x y", 4), ('q"t', 2)), "order": (("a", 2), ("b", 2))}
    (position, argument), *others = mlir.argument_shardings(module).items()
    assert position == 0 and not others
    assert mlir.stated_sharding(argument, meshes).dims == (whole("x y"), whole('q"t'))
    (region,) = [op for op in mlir.number_ops(module) if op.name == "sdy.manual_computation"]
    assert mlir.manual_axes(region) == ("x y", 'q"t')


def test_another_mesh_is_named_wherever_a_module_names_one() -> None:
    """Compare with the module whose text has the other name: MLIR reads it as the same module."""
    module = mlir.parse_module(SOURCE)
    mlir.ensure_mesh(module, "other", {"x y": 4, 'q"t': 2, "z": 1})
    mlir.use_mesh(module, "other")
    head, _, body = SOURCE.partition("func.func")
    wanted = f"""{head}sdy.mesh @other = <["x y"=4, "q\\22t"=2, "z"=1]>
        func.func{body.replace('@"my mesh, [1]"', "@other")}"""
    assert module.operation.verify()
    same = mlir.parse_module(wanted)
    texts, others = ([str(op) for op in mlir.main_block(each).operations] for each in (module, same))
    assert texts == others and "my mesh" not in "".join(texts)


def test_a_mesh_by_any_name_gives_one_hash() -> None:
    renamed = SOURCE.replace('"my mesh, [1]"', "plain")
    hashes = {mlir.structure_hash(mlir.parse_module(text)) for text in (SOURCE, renamed)}
    assert len(hashes) == 1
    split = renamed.replace("{?}], replicated", "{}], replicated")
    assert mlir.structure_hash(mlir.parse_module(split)) not in hashes


@pytest.mark.parametrize(
    ("texts", "tiles", "open_"),
    [
        ('mhlo.sharding = "{devices=[2,1]<=[2]}"', "{devices=[2,1]<=[2]}", (False, False)),
        ('mhlo.sharding = "{replicated}", backend_config = "unspecified_dims=[1]"', "{replicated}", (False, True)),
        ('backend_config = "unspecified_dims=[0,1]"', "{replicated}", (True, True)),
        ('mhlo.sharding = "{manual metadata={op=\\22a\\22}}"', '{manual metadata={op="a"}}', (False, False)),
    ],
)
def test_calls_in_gspmd_s_form_name_no_axes(texts: str, tiles: str, open_: tuple[bool, ...]) -> None:
    module = mlir.parse_module(f"""
        func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {{
          %0 = stablehlo.custom_call @Sharding(%x) {{{texts}}} : (tensor<8x4xf32>) -> tensor<8x4xf32>
          return %0 : tensor<8x4xf32>
        }}""")
    assert mlir.tiled_sharding(mlir.number_ops(module)[0], 2) == Sharding(((), ()), open_, tiles=tiles)


def test_constraints_are_counted_on_meshes_of_several_devices_only() -> None:
    module = mlir.parse_module(
        SOURCE.replace(
            "  return %1",
            """  %2 = sdy.sharding_constraint %1 <mesh<["a=2"=1]>, [{"a=2"}, {}]> : tensor<8x4xf32>
  %3 = sdy.sharding_constraint %2 <mesh<[]>, [{}, {}]> : tensor<8x4xf32>
  return %3""",
        )
    )
    assert mlir.count_constraints(module) == mlir.ConstraintCounts(constraints=1, arguments=1, regions=1, idle=1)
    mlir.inline_calls(module)
    assert mlir.count_constraints(module) == mlir.ConstraintCounts(constraints=1, arguments=1, regions=1, idle=0)


@pytest.mark.parametrize(
    ("text", "shape", "dtype", "size"),
    [
        ("tensor<f32>", (), "float32", 4),
        ("tensor<8x16xbf16>", (8, 16), "bfloat16", 2),
        ("tensor<2x3x4xi1>", (2, 3, 4), "bool", 1),
        ("tensor<5xi4>", (5,), "int4", 1),
        ("tensor<4xf8E4M3FN>", (4,), "float8_e4m3fn", 1),
        ("tensor<8x4xcomplex<f32>>", (8, 4), "complex64", 8),
        ("tensor<complex<f64>>", (), "complex128", 16),
        ("tensor<0x7xui32>", (0, 7), "uint32", 4),
        ("tensor<4xf32, 1 : i64>", (4,), "float32", 4),
        ("tensor<4xindex>", (4,), "index", 1),
        ("!stablehlo.token", (), "token", 0),
        ("tuple<tensor<4xf32>>", (), "token", 0),
        ("tensor<?x4xf32>", (), "token", 0),
    ],
)
def test_types_are_shapes_and_sizes(text: str, shape: tuple[int, ...], dtype: str, size: int) -> None:
    assert mlir.tensor_type(ir.Type.parse(text, mlir.new_context())) == (shape, dtype, size)


def test_written_rules_are_read_back() -> None:
    """Read also the rule that Shardy itself writes on a matmul."""
    module = mlir.parse_module("""
        func.func @main(%x: tensor<2x8x4xf32>, %w: tensor<2x4x6xf32>) -> tensor<2x8x6xf32> {
          %0 = stablehlo.dot_general %x, %w, batching_dims = [0] x [0], contracting_dims = [2] x [1]
            : (tensor<2x8x4xf32>, tensor<2x4x6xf32>) -> tensor<2x8x6xf32>
          return %0 : tensor<2x8x6xf32>
        }""")
    dot = mlir.number_ops(module)[0]
    assert mlir.read_rule(dot) is None
    mlir.populate_rules(module)
    rule = mlir.read_rule(dot)
    assert rule is not None
    assert rule[:2] == ((2, 8, 6, 4), ("parallel", "parallel", "parallel", "reduction"))
    assert rule[2:] == ((((0,), (1,), (3,)), ((0,), (3,), (2,))), (((0,), (1,), (2,)),))
    with module.context:
        written = sdy.OpShardingRuleAttr(mlir.rule_attribute(*rule))
        assert written.is_custom
        dot.attributes["sdy.sharding_rule"] = written
    assert mlir.read_rule(dot) == rule
