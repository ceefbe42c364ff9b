"""Reading collectives from HLO: shapes, group syntaxes, loops, asynchronous and fused forms."""

import pathlib

import pytest

import autoshard
from autoshard.cost import Topology, make_mesh
from autoshard.exec import count_by_kind, read_collectives, wire_by_axis
from autoshard.exec.hlo.compiled_collectives import parse_groups
from autoshard.exec.hlo.hlo_text import parse_hlo


MESH = make_mesh(Topology.parse("cpu:8"), {"data": 2, "model": 4})


def module(body: str, before: str = "") -> str:
    return (
        "HloModule m, is_scheduled=true, num_partitions=8\n\n"
        f"%add (a: f32[], b: f32[]) -> f32[] {{\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        f"  ROOT %r = f32[] add(%a, %b)\n}}\n\n{before}\n"
        f"ENTRY %main (p: f32[16,16]) -> f32[16,16] {{\n  %p = f32[16,16]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def only(body: str, before: str = "", mesh=MESH):
    (collective,) = read_collectives(module(body, before), mesh)
    return collective


MODEL, DATA = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[1,8]<=[8]", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_groups_in_every_syntax(text, groups):
    assert sorted(map(sorted, parse_groups(text, 8))) == sorted(map(sorted, groups))


SIZE = 16 * 16 * 4


@pytest.mark.parametrize(
    ("line", "kind", "axes", "size", "wire"),
    [
        (
            f"ROOT %r = f32[16,16]{{1,0}} all-reduce(%p), replica_groups={MODEL}, to_apply=%add",
            "all-reduce",
            ("model",),
            SIZE,
            {"model": 2 * SIZE * 3 / 4},
        ),
        (
            "ROOT %r = f32[16,16]{1,0} all-reduce(%p), replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], "
            "device_ids=([2,4]T(1,0)) {'axis_2'}, to_apply=%add",
            "all-reduce",
            ("data",),
            SIZE,
            {"data": SIZE},
        ),
        (
            f"ROOT %r = f32[64,16]{{1,0}} all-gather(%p), replica_groups={MODEL}, dimensions={{0}}",
            "all-gather",
            ("model",),
            4 * SIZE,
            {"model": 3 * SIZE},
        ),
        (
            "ROOT %r = f32[4,16] reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add",
            "reduce-scatter",
            ("model",),
            SIZE,
            {"model": SIZE * 3 / 4},
        ),
        (
            f"ROOT %r = f32[16,16]{{1,0}} all-to-all(%p), replica_groups={DATA}, dimensions={{0}}",
            "all-to-all",
            ("data",),
            SIZE,
            {"data": SIZE / 2},
        ),
        # The whole mesh: the last axis first with its full size, then the rest of the first axis.
        (
            "ROOT %r = f32[16,16]{1,0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add",
            "all-reduce",
            ("data", "model"),
            SIZE,
            {"data": 2 * SIZE / 8, "model": 2 * SIZE * 3 / 4},
        ),
        # Half of an axis is still traffic on that axis; groups across parts of two axes are not.
        (
            "ROOT %r = f32[16,16]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add",
            "all-reduce",
            ("model",),
            SIZE,
            {"model": SIZE},
        ),
        (
            "ROOT %r = f32[16,16]{1,0} all-reduce(%p), replica_groups={{0,5},{1,4},{2,7},{3,6}}, to_apply=%add",
            "all-reduce",
            ("other",),
            SIZE,
            {"other": SIZE},
        ),
        (
            "ROOT %r = f32[16,16]{1,0} collective-permute(%p), source_target_pairs="
            "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}",
            "collective-permute",
            ("model",),
            SIZE,
            {"model": SIZE},
        ),
        # A halo: three devices of four send.
        (
            "ROOT %r = f32[16,16]{1,0} collective-permute(%p), source_target_pairs="
            "{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}",
            "collective-permute",
            ("model",),
            SIZE,
            {"model": SIZE * 3 / 4},
        ),
    ],
)
def test_each_kind(line, kind, axes, size, wire):
    collective = only("  " + line)
    assert (collective.kind, collective.axes, collective.size_bytes, collective.count) == (kind, axes, size, 1)
    assert collective.wire == pytest.approx(wire)
    assert not collective.asynchronous and not collective.in_loop


def test_combined_and_narrow_arrays_add_up():
    collective = only(
        "  %q = bf16[8]{0} convert(%p)\n"
        f"  ROOT %r = (f32[16,16], bf16[8]{{0:T(256)}}) all-reduce(%p, %q), replica_groups={MODEL}, to_apply=%add"
    )
    assert (collective.size_bytes, collective.count, collective.arrays) == (SIZE + 16, 1, 2)
    assert count_by_kind([collective]) == {"all-reduce": 2}


def test_groups_of_one_send_nothing():
    line = "  ROOT %r = f32[16,16]{1,0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add"
    assert read_collectives(module(line), MESH) == []


def test_start_and_done_count_once():
    collective = only(
        "  %s = (f32[16,16]{1,0}, f32[64,16]{1,0}) all-gather-start(%p), "
        f"replica_groups={MODEL}, dimensions={{0}}\n"
        "  ROOT %d = f32[64,16]{1,0} all-gather-done(%s)"
    )
    assert (collective.kind, collective.size_bytes, collective.asynchronous) == ("all-gather", 4 * SIZE, True)
    permute = only(
        "  %s = (f32[16,16]{1,0}, f32[16,16]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), "
        "source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}\n"
        "  ROOT %d = f32[16,16]{1,0} collective-permute-done(%s)"
    )
    assert (permute.size_bytes, permute.wire, permute.asynchronous) == (SIZE, {"data": SIZE}, True)


def test_a_generic_asynchronous_pair_counts_its_body():
    before = (
        "%wrapped (x: f32[16,16]) -> f32[4,16] {\n  %x = f32[16,16]{1,0} parameter(0)\n"
        f"  ROOT %rs = f32[4,16] reduce-scatter(%x), replica_groups={MODEL}, dimensions={{0}}, to_apply=%add\n}}\n"
    )
    collective = only(
        "  %s = ((f32[16,16]{1,0}), f32[4,16]{1,0}, u32[]) async-start(%p), calls=%wrapped\n"
        "  ROOT %d = f32[4,16]{1,0} async-done(%s), calls=%wrapped",
        before,
    )
    assert (collective.kind, collective.asynchronous) == ("reduce-scatter", True)


def test_what_the_sparse_cores_do_is_found():
    before = (
        "%inside (x: f32[4,16]) -> f32[16,16] {\n  %x = f32[4,16]{1,0} parameter(0)\n"
        f"  ROOT %ag = f32[16,16] all-gather(%x), replica_groups={MODEL}, dimensions={{0}}\n}}\n"
        "%wrapped (y: f32[4,16]) -> f32[16,16] {\n  %y = f32[4,16]{1,0} parameter(0)\n"
        '  ROOT %c = f32[16,16] custom-call(%y), custom_call_target="x", called_computations={%inside}\n}\n'
    )
    collective = only(
        "  %s = ((f32[4,16]{1,0}), f32[16,16]{1,0}, u32[]) async-start(%p), calls=%wrapped\n"
        "  ROOT %d = f32[16,16]{1,0} async-done(%s), calls=%wrapped",
        before,
    )
    assert (collective.kind, collective.asynchronous, collective.wire) == ("all-gather", True, {"model": SIZE * 3 / 4})


def test_tpu_fused_all_reduce_and_slice_is_one_reduce_scatter():
    before = (
        "%all-reduce-scatter (x: f32[16,16]) -> f32[4,16] {\n  %x = f32[16,16]{1,0:T(8,128)} parameter(0)\n"
        f"  %ar = f32[16,16]{{1,0:T(8,128)}} all-reduce(%x), replica_groups={MODEL}, to_apply=%add\n"
        "  %zero = u32[] constant(0)\n"
        "  ROOT %ds = f32[4,16]{1,0:T(8,128)} dynamic-slice(%ar, %zero, %zero), dynamic_slice_sizes={4,16}\n}\n"
    )
    collective = only("  ROOT %f = f32[4,16]{1,0:T(8,128)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter", before)
    assert (collective.kind, collective.size_bytes, collective.wire) == (
        "reduce-scatter",
        SIZE,
        {"model": SIZE * 3 / 4},
    )


def test_tpu_asynchronous_fusions_count_once():
    gather = (
        f'all-gather(%x), channel_id=5, replica_groups={MODEL}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}'
    )
    before = (
        "%begin (x: f32[16,16]) -> (f32[16,16], f32[64,16]) {\n  %x = f32[16,16]{1,0} parameter(0)\n"
        f"  %ag = f32[64,16]{{1,0}} {gather}\n"
        "  ROOT %c = (f32[16,16]{1,0}, f32[64,16]{1,0}, u32[]{:S(2)}) custom-call(%ag), "
        'custom_call_target="AsyncCollectiveStart"\n}\n\n'
        "%during (x: f32[16,16]) -> f32[64,16] {\n  %x = f32[16,16]{1,0} parameter(0)\n"
        f"  ROOT %ag2 = f32[64,16]{{1,0}} {gather}\n}}\n\n"
        "%end (x: f32[16,16]) -> f32[64,16] {\n  %x = f32[16,16]{1,0} parameter(0)\n"
        f"  %ag3 = f32[64,16]{{1,0}} {gather}\n"
        '  ROOT %c = f32[64,16]{1,0} custom-call(%ag3), custom_call_target="AsyncCollectiveDone"\n}\n'
    )
    collective = only(
        "  %a = (f32[16,16]{1,0}, f32[64,16]{1,0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%begin\n"
        "  %b = f32[64,16]{1,0} fusion(%p), kind=kOutput, calls=%during\n"
        "  ROOT %c = f32[64,16]{1,0} fusion(%p), kind=kCustom, calls=%end",
        before,
    )
    assert (collective.kind, collective.asynchronous, collective.size_bytes) == ("all-gather", True, 4 * SIZE)


def loop(condition: str, change: str, start: int = 0, config: str = "") -> tuple[str, str]:
    before = (
        "%body (t: (s32[], f32[16,16])) -> (s32[], f32[16,16]) {\n"
        "  %t = (s32[], f32[16,16]{1,0}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n  %x = f32[16,16]{1,0} get-tuple-element(%t), index=1\n"
        f"  %ar = f32[16,16]{{1,0}} all-reduce(%x), replica_groups={MODEL}, to_apply=%add\n{change}\n"
        "  ROOT %out = (s32[], f32[16,16]{1,0}) tuple(%n, %ar)\n}\n\n"
        "%cond (t: (s32[], f32[16,16])) -> pred[] {\n  %t = (s32[], f32[16,16]{1,0}) parameter(0)\n"
        f"  %i = s32[] get-tuple-element(%t), index=0\n{condition}\n}}\n"
    )
    body = (
        f"  %start = s32[] constant({start})\n  %init = (s32[], f32[16,16]{{1,0}}) tuple(%start, %p)\n"
        f"  %w = (s32[], f32[16,16]{{1,0}}) while(%init), condition=%cond, body=%body{config}\n"
        "  ROOT %r = f32[16,16]{1,0} get-tuple-element(%w), index=1"
    )
    return body, before


UP = "  %one = s32[] constant(1)\n  %n = s32[] add(%i, %one)"


@pytest.mark.parametrize(
    ("condition", "change", "start", "config", "trips"),
    [
        ("  %l = s32[] constant(9)\n  ROOT %c = pred[] compare(%i, %l), direction=LT", UP, 0, "", 9),
        ("  %l = s32[] constant(9)\n  ROOT %c = pred[] compare(%i, %l), direction=LE", UP, 2, "", 8),
        ("  %l = s32[] constant(9)\n  ROOT %c = pred[] compare(%l, %i), direction=GT", UP, 0, "", 9),
        (
            "  %l = s32[] constant(9)\n  ROOT %c = pred[] compare(%i, %l), direction=LT",
            "  %one = s32[] constant(2)\n  %k = s32[] copy(%i)\n  %n = s32[] add(%one, %k)",
            0,
            "",
            5,
        ),
        (
            "  %l = s32[] constant(0)\n  ROOT %c = pred[] compare(%i, %l), direction=GT",
            "  %one = s32[] constant(1)\n  %n = s32[] subtract(%i, %one)",
            6,
            "",
            6,
        ),
        (
            "  ROOT %c = pred[] custom-call(%i)",
            UP,
            0,
            ', backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}',
            12,
        ),
    ],
)
def test_loops_are_multiplied_by_their_trips(condition, change, start, config, trips):
    body, before = loop(condition, change, start, config)
    collective = only(body, before)
    assert (collective.count, collective.in_loop, collective.trips_known) == (trips, True, True)
    assert collective.wire["model"] == pytest.approx(trips * 2 * SIZE * 3 / 4)


def test_a_trip_count_behind_a_fusion_is_found():
    body, before = loop(
        "  ROOT %c = pred[] fusion(%i), kind=kLoop, calls=%less", "  %n = s32[] fusion(%i), kind=kLoop, calls=%inc"
    )
    fused = (
        "%less (i: s32[]) -> pred[] {\n  %i = s32[] parameter(0)\n  %l = s32[] constant(7)\n"
        "  ROOT %c = pred[] compare(%i, %l), direction=LT\n}\n\n"
        "%inc (i: s32[]) -> s32[] {\n  %i = s32[] parameter(0)\n  %one = s32[] constant(1)\n"
        "  ROOT %n = s32[] add(%i, %one)\n}\n\n"
    )
    assert only(body, fused + before).count == 7


def test_an_unknown_trip_count_is_reported():
    body, before = loop("  ROOT %c = pred[] custom-call(%i)", UP)
    collective = only(body, before)
    assert (collective.count, collective.in_loop, collective.trips_known) == (1, True, False)


@pytest.mark.parametrize(
    ("limit", "direction", "step", "start", "trips"),
    [
        (9, "NE", 3, 0, 3),
        (9, "NE", 2, 0, None),  # never equal: the loop does not end
        (9, "LT", -1, 0, None),
        (0, "GT", 1, 6, None),
        (9, "EQ", 1, 9, None),
        (5, "LT", -1, 6, 0),
    ],
)
def test_a_counter_must_reach_its_limit(limit: int, direction: str, step: int, start: int, trips: int | None) -> None:
    condition = f"  %l = s32[] constant({limit})\n  ROOT %c = pred[] compare(%i, %l), direction={direction}"
    body, before = loop(condition, f"  %one = s32[] constant({step})\n  %n = s32[] add(%i, %one)", start)
    collectives = read_collectives(module(body, before), MESH)
    if trips == 0:
        assert not collectives or collectives[0].count == 0
    else:
        assert (collectives[0].trips_known, collectives[0].count) == (trips is not None, trips or 1)


def test_of_a_conditional_the_larger_branch_counts():
    def branch(name: str, dims: str) -> str:
        return (
            f"%{name} (x: f32[{dims}]) -> f32[{dims}] {{\n  %x = f32[{dims}] parameter(0)\n"
            f"  ROOT %ar = f32[{dims}] all-reduce(%x), replica_groups={MODEL}, to_apply=%add\n}}\n\n"
        )

    body = (
        "  %k = s32[] constant(0)\n  ROOT %r = f32[16,16] conditional(%k, %p, %p), branch_computations={%small, %large}"
    )
    assert only(body, branch("small", "4") + branch("large", "16,16")).size_bytes == SIZE


def test_transfers_between_slices_are_found():
    mesh = make_mesh(Topology.parse("v5e:4x4*2"), {"data": 8, "model": 4})
    assert any(segment.kind == "network" for segment in mesh.segments("data"))
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:15}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    inside = "{{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}"
    text = module(
        "  %t = token[] after-all()\n"
        f"  %rs = f32[4,16]{{1,0}} reduce-scatter(%p), replica_groups={inside}, dimensions={{0}}, to_apply=%add\n"
        f"  %s = (f32[4,16]{{1,0}}, u32[], token[]) send(%rs, %t), channel_id=2, {attributes}\n"
        f"  %v = (f32[4,16]{{1,0}}, u32[], token[]) recv(%t), channel_id=1, {attributes}\n"
        "  %sd = token[] send-done(%s), is_host_transfer=true\n"
        "  ROOT %vd = (f32[4,16]{1,0}, token[]) recv-done(%v), is_host_transfer=true"
    )
    inner, outer = read_collectives(text, mesh)
    assert (inner.kind, inner.axes, inner.group, inner.network) == ("reduce-scatter", ("data",), 4, False)
    assert inner.wire == {"data": SIZE * 3 / 4}
    assert (outer.kind, outer.axes, outer.group, outer.network) == ("all-reduce", ("data",), 2, True)
    assert outer.wire == {"data": SIZE / 4}


def test_totals():
    collectives = read_collectives(
        module(
            f"  %a = f32[16,16]{{1,0}} all-reduce(%p), replica_groups={MODEL}, to_apply=%add\n"
            f"  ROOT %b = f32[16,16]{{1,0}} all-reduce(%a), replica_groups={DATA}, to_apply=%add"
        ),
        MESH,
    )
    assert wire_by_axis(collectives) == {"data": SIZE, "model": SIZE * 3 // 2}
    assert count_by_kind(collectives) == {"all-reduce": 2}


def test_shapes_with_layouts_spaces_and_comments():
    parsed = parse_hlo(
        module(
            "  ROOT %r = (bf16[8,1024]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/u32[]{:S(2)}, f8e4m3fn[16]{0}, s4[7]{0:E(4)})"
            ' custom-call(%p), custom_call_target="x", metadata={op_name="a(b, {c" source_line=3}'
        )
    )
    op = parsed.computations["main"].root
    assert [(s.dtype, s.dims, s.space, s.bytes) for s in op.shapes] == [
        ("bf16", (8, 1024), 1, 16384),
        ("u32", (), 2, 4),
        ("f8e4m3fn", (16,), 0, 16),
        ("s4", (7,), 0, 4),
    ]
    assert op.op_name == "a(b, {c" and op.operands == ("p",)


def test_a_collective_without_a_name_takes_its_neighbours():
    collective = only(
        f"  %a = f32[16,16] all-reduce(%p), replica_groups={MODEL}, to_apply=%add, "
        'metadata={op_name="custom-call.4"}\n'
        '  ROOT %b = f32[16,16] copy(%a), metadata={op_name="jit(step)/jvp()/dot_general"}'
    )
    assert collective.source == "jit(step)/jvp()/dot_general"


def test_a_collective_names_the_users_source_line():
    """Skip frames of the installed package, which the user did not write, up to the caller."""
    ours = pathlib.Path(autoshard.__file__).parent / "program" / "quantised" / "eight_bits.py"
    text = (
        f'HloModule m, is_scheduled=true, num_partitions=8\n\nFileNames\n1 "/a/model.py"\n2 "{ours}"\n\n'
        'FunctionNames\n1 "step"\n\n'
        "FileLocations\n1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}\n"
        "2 {file_name_id=2 function_name_id=1 line=89 end_line=89 column=1 end_column=2}\n\n"
        "StackFrames\n1 {file_location_id=2 parent_frame_id=2}\n2 {file_location_id=1 parent_frame_id=2}\n\n"
        "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        "  ROOT %ar = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add, "
        'metadata={op_name="jit(step)/sum" stack_frame_id=1}\n}\n'
    )
    (found,) = read_collectives(text, make_mesh(Topology.parse("cpu:8"), {"data": 8}))
    assert (found.source, found.line) == ("jit(step)/sum", "model.py:7")
