"""Times from schedules: FLOPs, traffic, collectives hidden and exposed, loops, transfers between slices."""

import math

import pytest

from autoshard.cost import Collectives, Compute, Topology, make_mesh
from autoshard.exec import decided, estimate
from autoshard.exec.hlo.hlo_text import Shape, parse_hlo
from autoshard.exec.hlo.instruction_work import Reader
from autoshard.exec.hlo.schedule_estimate import estimator_error, pair_error


MESH = make_mesh(Topology.parse("v5e:4x4"), {"data": 4, "model": 4})
COMPUTE = Compute(MESH.topology)
PRICES = Collectives(MESH)
OVERHEAD = COMPUTE.calibration.op_overhead_s
MODEL = "replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}"
DATA = "replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}"
T = "{1,0:T(8,128)(2,1)}"
BIG = f"bf16[4096,4096]{T}"
SIZE = 4096 * 4096 * 2


def module(
    body: str, before: str = "", parameters: str = f"  %p = {BIG} parameter(0)\n  %q = {BIG} parameter(1)\n"
) -> str:
    return (
        "HloModule m, is_scheduled=true, num_partitions=16\n\n"
        "%add (a: bf16[], b: bf16[]) -> bf16[] {\n  %a = bf16[] parameter(0)\n  %b = bf16[] parameter(1)\n"
        f"  ROOT %r = bf16[] add(%a, %b)\n}}\n\n{before}\n"
        f"ENTRY %main (p: bf16[4096,4096], q: bf16[4096,4096]) -> bf16[4096,4096] {{\n{parameters}{body}\n}}\n"
    )


def matmul(name: str, a: str = "p", b: str = "q") -> str:
    return f"  %{name} = {BIG} dot(%{a}, %{b}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n"


ONE = float(COMPUTE.dot_seconds(4096, 4096, 4096))
REDUCE = float(PRICES.time("all-reduce", ("model",), SIZE))


def test_a_matmul_takes_its_roofline():
    estimated = estimate(module(matmul("d").replace("%d", "ROOT %d")), MESH)
    assert estimated.flops == 2 * 4096**3
    assert estimated.step_time_s == pytest.approx(ONE)
    assert estimated.by_kind["matmul"] == pytest.approx(ONE - OVERHEAD)
    assert estimated.exposed_comm_s == 0


def test_a_copy_takes_its_traffic():
    estimated = estimate(module(f"  ROOT %c = {BIG} copy(%p)"), MESH)
    assert estimated.compute_s == pytest.approx(float(COMPUTE.memory_seconds(2 * SIZE)) + OVERHEAD)


@pytest.mark.parametrize(
    ("array", "held"),
    [
        ("f32[64,8,16,64,64]{4,3,2,1,0:T(8,128)}", 64 * 8 * 16 * 64 * 128 * 4),
        ("f32[8,2048,12,64]{1,3,2,0:T(8,128)}", 8 * 2048 * 12 * 64 * 4),
        ("f32[65536,4,4]{2,1,0:T(4,128)}", 65536 * 4 * 128 * 4),
        ("bf16[4096,27,27]{2,1,0:T(8,128)(2,1)}", 4096 * 32 * 128 * 2),
        ("f32[100,30]{1,0}", 100 * 30 * 4),
    ],
)
def test_traffic_is_that_of_whole_tiles(array: str, held: int):
    """Read whole tiles, for the layouts of arrays in compiled recurrences, caches and batches of small matrices."""
    parameters = f"  %p = {array} parameter(0)\n"
    found = work(module(f"  ROOT %c = {array} copy(%p)", parameters=parameters), "c")
    assert found.hbm_bytes == 2 * held


def test_what_is_made_in_the_memory_of_the_scalar_core_starts_no_kernel():
    count = "  %n = s32[] parameter(2)\n  %i = s32[]{:T(128)S(6)} add(%n, %n)\n"
    aside = f"  %w = {BIG} add(%p, %q)\n"
    plain, counted, wide = (estimate(module(before + matmul("d").replace("%d", "ROOT %d")), MESH)
                            for before in ("", count, aside))  # fmt: skip
    assert counted.by_kind["overhead"] == pytest.approx(plain.by_kind["overhead"])
    assert counted.step_time_s == pytest.approx(ONE)
    assert wide.by_kind["overhead"] == pytest.approx(2 * OVERHEAD)


def test_a_synchronous_collective_is_exposed():
    estimated = estimate(module(matmul("d") + f"  ROOT %r = {BIG} all-reduce(%d), {MODEL}, to_apply=%add"), MESH)
    assert estimated.exposed_comm_s == pytest.approx(REDUCE)
    assert estimated.step_time_s == pytest.approx(ONE + REDUCE)
    assert estimated.hidden_comm_s == pytest.approx(0, abs=1e-12)
    assert set(estimated.traffic) == {("all-reduce", False)}
    assert estimated.traffic["all-reduce", False].waited_s == estimated.exposed_comm_s


def asynchronous(between: str) -> str:
    return module(
        f"  %s = ({BIG}, {BIG}) collective-permute-start(%p), "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4},{8,9},{9,10},{10,11},{11,8},"
        "{12,13},{13,14},{14,15},{15,12}}\n" + between + f"  ROOT %e = {BIG} collective-permute-done(%s)"
    )


def test_an_asynchronous_collective_hides_behind_what_stands_between():
    wire = float(PRICES.time("collective-permute", ("model",), SIZE))
    alone, beside = estimate(asynchronous(""), MESH), estimate(asynchronous(matmul("d")), MESH)
    assert alone.exposed_comm_s == pytest.approx(wire)
    assert beside.step_time_s == pytest.approx(max(ONE, wire))
    assert beside.hidden_comm_s == pytest.approx(min(ONE, wire))
    assert beside.exposed_comm_s == pytest.approx(max(0.0, wire - ONE))
    permutes = beside.traffic["collective-permute", False]
    assert beside.hidden == {"others": pytest.approx(min(1.0, ONE / wire))}
    assert permutes.sent_s == pytest.approx(wire) and permutes.waited_s == pytest.approx(max(0.0, wire - ONE))


def test_collectives_on_the_same_links_queue_and_others_do_not():
    def started(name: str, groups: str) -> str:
        return f"  %{name} = {BIG} all-reduce-start(%p), {groups}, to_apply=%add\n"

    done = f"  %x = {BIG} all-reduce-done(%a)\n  ROOT %y = {BIG} all-reduce-done(%b)"
    same = estimate(module(started("a", MODEL) + started("b", MODEL) + done), MESH)
    apart = estimate(module(started("a", MODEL) + started("b", DATA) + done), MESH)
    assert same.step_time_s == pytest.approx(2 * REDUCE)
    assert apart.step_time_s == pytest.approx(REDUCE)


def test_loops_are_multiplied():
    before = (
        f"%body (t: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {{\n  %t = (s32[], {BIG}) parameter(0)\n"
        f"  %i = s32[] get-tuple-element(%t), index=0\n  %p = {BIG} get-tuple-element(%t), index=1\n"
        + matmul("d", "p", "p")
        + f"  %r = {BIG} all-reduce(%d), {MODEL}, to_apply=%add\n  %one = s32[] constant(1)\n"
        f"  %n = s32[] add(%i, %one)\n  ROOT %o = (s32[], {BIG}) tuple(%n, %r)\n}}\n\n"
        f"%cond (t: (s32[], bf16[4096,4096])) -> pred[] {{\n  %t = (s32[], {BIG}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n  %l = s32[] constant(6)\n"
        "  ROOT %c = pred[] compare(%i, %l), direction=LT\n}\n"
    )
    body = (
        f"  %zero = s32[] constant(0)\n  %init = (s32[], {BIG}) tuple(%zero, %p)\n"
        f"  %w = (s32[], {BIG}) while(%init), condition=%cond, body=%body\n"
        f"  ROOT %r = {BIG} get-tuple-element(%w), index=1"
    )
    twice = estimate(module(body, before), MESH, layers=(7, 13))
    estimated = estimate(module(body, before), MESH)
    assert twice.step_time_s == pytest.approx(2 * estimated.step_time_s, rel=0.01)
    assert estimated.flops == 6 * 2 * 4096**3
    assert estimated.exposed_comm_s == pytest.approx(6 * REDUCE)
    assert estimated.traffic["all-reduce", False].sent_s == pytest.approx(6 * REDUCE)
    assert estimated.step_time_s == pytest.approx(6 * (ONE + REDUCE), rel=0.01)
    assert estimated.unknown_trips == 0


def test_asynchronous_fusions_hide_too():
    gather = f'all-gather(%x), channel_id=5, {MODEL}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}'
    whole = "bf16[16384,4096]{1,0:T(8,128)(2,1)}"
    before = (
        f"%begin (x: bf16[4096,4096]) -> (bf16[4096,4096], bf16[16384,4096]) {{\n  %x = {BIG} parameter(0)\n"
        f"  %ag = {whole} {gather}\n  ROOT %c = ({BIG}, {whole}, u32[]{{:S(2)}}) custom-call(%ag), "
        'custom_call_target="AsyncCollectiveStart"\n}\n\n'
        f"%during (x: bf16[4096,4096], y: bf16[4096,4096]) -> bf16[4096,4096] {{\n  %x = {BIG} parameter(0)\n"
        f"  %y = {BIG} parameter(1)\n  %ag2 = {whole} {gather}\n"
        f"  ROOT %d = {BIG} dot(%x, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n}}\n\n"
        f"%end (x: bf16[4096,4096]) -> bf16[16384,4096] {{\n  %x = {BIG} parameter(0)\n  %ag3 = {whole} {gather}\n"
        f'  ROOT %c = {whole} custom-call(%ag3), custom_call_target="AsyncCollectiveDone"\n}}\n'
    )
    estimated = estimate(
        module(
            f"  %a = ({BIG}, {whole}, u32[]{{:S(2)}}) fusion(%p), kind=kCustom, calls=%begin\n"
            f"  %b = {BIG} fusion(%p, %q), kind=kOutput, calls=%during\n"
            f"  ROOT %c = {whole} fusion(%p), kind=kCustom, calls=%end",
            before,
        ),
        MESH,
    )
    wire = float(PRICES.time("all-gather", ("model",), 4 * SIZE))
    assert estimated.flops == 2 * 4096**3
    assert estimated.step_time_s == pytest.approx(max(wire, ONE))
    assert estimated.hidden_comm_s == pytest.approx(min(wire, ONE))


def test_transfers_between_slices_run_on_the_network():
    mesh = make_mesh(Topology.parse("v5e:4x4*2"), {"data": 8, "model": 4})
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_host_transfer_rendezvous="all-reduce.1_0",_xla_megascale_target="{1,2}x{0:15}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    head = (
        "  %t = token[] after-all()\n"
        f"  %s = ({BIG}, u32[], token[]) send(%p, %t), channel_id=2, {attributes}\n"
        f"  %v = ({BIG}, u32[], token[]) recv(%t), channel_id=1, {attributes}\n"
    )
    tail = (
        "  %sd = token[] send-done(%s), is_host_transfer=true\n"
        f"  ROOT %vd = ({BIG}, token[]) recv-done(%v), is_host_transfer=true"
    )
    alone = estimate(module(head + tail), mesh)
    slowest = SIZE / mesh.topology.chip.network_bytes_per_s_per_chip
    # Slices that share the network slow each other down.
    assert slowest <= alone.exposed_comm_s <= 2 * slowest
    beside = estimate(module(head + matmul("d") + tail), mesh)
    assert beside.step_time_s == pytest.approx(alone.step_time_s)
    # A step waits for the slower slice, whose matmul takes a little longer.
    assert ONE <= beside.hidden_comm_s <= 1.02 * ONE
    (between,) = beside.traffic.items()
    assert between[0] == ("all-reduce", True)
    assert between[1].sent_s - between[1].waited_s == pytest.approx(beside.hidden_comm_s)
    # Inside a slice only the slice's part of the axis is priced.
    inner = estimate(module(f"  ROOT %r = {BIG} all-reduce(%p), {DATA}, to_apply=%add"), mesh)
    assert inner.step_time_s < alone.step_time_s / 2


def work(text: str, name: str):
    parsed = parse_hlo(text)
    owner = parsed.computations["main"]
    return Reader(parsed).work(owner, owner.by_name[name])


@pytest.mark.parametrize(
    ("left", "right", "out", "window", "labels", "flops"),
    [
        # Plain, batched by a dilated window, batched by a reversed window, contracted over two dims.
        ("32,1024,512", "512,2048,1", "32,1024,2048", "size=1", "0bf_io0->0bf", 2 * 32 * 1024 * 512 * 2048),
        (
            "32,1024,4,128",
            "32,1024,4,128",
            "32,4,1024,1024",
            "size=32x4 stride=31x3 lhs_dilate=32x4",
            "0b1f_0o1i->01bf",
            2 * 32 * 4 * 1024 * 1024 * 128,
        ),
        (
            "32,1024,4,128",
            "32,4,1024,1024",
            "32,4,1024,128",
            "size=32x4 stride=32x4 pad=31_31x3_3 lhs_dilate=31x3 rhs_reversal=1x1",
            "0f1b_01oi->01fb",
            2 * 32 * 4 * 1024 * 1024 * 128,
        ),
        ("32,1024,4,128", "4,128,512,1", "32,1024,512,1", "size=1x4", "0b1f_1io0->0bf1", 2 * 32 * 1024 * 512 * 512),
        # An image convolution, 3 x 3 with padding: outputs at corners read four pixels, at edges six, inside nine.
        (
            "8,5,5,16",
            "3,3,16,32",
            "8,5,5,32",
            "size=3x3 pad=1_1x1_1",
            "b01f_01io->b01f",
            2 * 8 * 16 * 32 * (4 * 4 + 12 * 6 + 9 * 9),
        ),
    ],
)
def test_convolutions_count_only_what_meets(left, right, out, window, labels, flops):
    text = module(
        f"  ROOT %c = bf16[{out}] convolution(%p, %q), window={{{window}}}, dim_labels={labels}",
        parameters=f"  %p = bf16[{left}] parameter(0)\n  %q = bf16[{right}] parameter(1)\n",
    )
    assert work(text, "c").flops == flops


@pytest.mark.parametrize(
    ("left", "right", "out", "window", "labels", "sizes"),
    [
        # Rows of two dims on the left: the compiler gives both forms of one product the same cycles.
        ("64,64,4096", "4096,14336,1", "64,64,14336", "size=1", "0bf_io0->0bf", (4096, 14336, 4096)),
        # The same product with its sides exchanged: the two dims of rows are columns, one of them the kernel's space.
        (
            "14336,4096,1",
            "64,64,4096",
            "14336,64,64",
            "size=64 pad=63_63 rhs_reversal=1",
            "bf0_0oi->b0f",
            (14336, 4096, 4096),
        ),
        # Contracted over both dims.
        ("64,14336,64", "64,64,4096", "14336,4096,1", "size=64", "0fb_0io->bf0", (14336, 4096, 4096)),
    ],
)
def test_products_over_two_dims_of_tokens_have_the_dims_of_one(left, right, out, window, labels, sizes):
    text = module(
        f"  ROOT %c = bf16[{out}] convolution(%p, %q), window={{{window}}}, dim_labels={labels}",
        parameters=f"  %p = bf16[{left}] parameter(0)\n  %q = bf16[{right}] parameter(1)\n",
    )
    (matmul,) = work(text, "c").matmuls
    assert (matmul.m, matmul.n, matmul.k) == sizes
    assert matmul.flops == 2 * math.prod(sizes)


def test_a_fusion_reads_slices_and_writes_updates_in_place():
    stack = "bf16[32,4096,4096]{2,1,0:T(8,128)(2,1)}"
    before = (
        f"%slice (x: bf16[32,4096,4096], i: s32[]) -> bf16[4096,4096] {{\n  %x = {stack} parameter(0)\n"
        "  %i = s32[] parameter(1)\n  %z = s32[] constant(0)\n"
        "  %d = bf16[1,4096,4096]{2,1,0} dynamic-slice(%x, %i, %z, %z), dynamic_slice_sizes={1,4096,4096}\n"
        f"  ROOT %b = {BIG} bitcast(%d)\n}}\n\n"
        f"%update (x: bf16[32,4096,4096], u: bf16[4096,4096], i: s32[]) -> bf16[32,4096,4096] {{\n"
        f"  %x = {stack} parameter(0)\n  %u = {BIG} parameter(1)\n  %i = s32[] parameter(2)\n  %z = s32[] constant(0)\n"
        "  %w = bf16[1,4096,4096]{2,1,0} bitcast(%u)\n"
        f"  ROOT %r = {stack} dynamic-update-slice(%x, %w, %i, %z, %z)\n}}\n"
    )
    text = module(
        f"  %i = s32[]{{:T(128)}} constant(3)\n  %one = {BIG} fusion(%s, %i), kind=kLoop, calls=%slice\n"
        f"  ROOT %two = {stack} fusion(%s, %one, %i), kind=kLoop, calls=%update",
        before,
        f"  %s = {stack} parameter(0)\n",
    )
    assert work(text, "one").hbm_bytes == pytest.approx(2 * SIZE, abs=64)
    assert work(text, "two").hbm_bytes == pytest.approx(2 * SIZE, abs=64)


@pytest.mark.parametrize(("table", "written"), [("parameter(2)", 0), ("broadcast(%c), dimensions={}", 1024)])
def test_a_fused_scatter_moves_its_rows_and_writes_the_table_that_the_fusion_makes(table: str, written: int):
    """Count rows of the table: 2 updates are read, 2 rows read and written, and a computed table written whole."""
    wide, rows, ids = "f32[1024,512]{1,0}", "f32[2,512]{1,0}", "s32[2,1]{1,0}"
    before = (
        f"%put (i: s32[2,1], u: f32[2,512], t: f32[1024,512]) -> f32[1024,512] {{\n  %i = {ids} parameter(0)\n"
        f"  %u = {rows} parameter(1)\n  %c = f32[] constant(0)\n  %t = {wide} {table}\n  %n = {rows} negate(%u)\n"
        f"  ROOT %r = {wide} scatter(%t, %i, %n), update_window_dims={{1}}, inserted_window_dims={{0}}, "
        "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add\n}\n"
    )
    text = module(
        f"  ROOT %s = {wide} fusion(%i, %u, %t), kind=kInput, calls=%put",
        before,
        f"  %i = {ids} parameter(0)\n  %u = {rows} parameter(1)\n  %t = {wide} parameter(2)\n",
    )
    if "parameter" not in table:
        text = text.replace("fusion(%i, %u, %t)", "fusion(%i, %u)")
    assert work(text, "s").hbm_bytes == (3 * 2 + written) * 512 * 4 + 2 * 4


def test_a_scatter_in_a_fusion_of_its_own_fills_the_table_that_the_outer_fusion_makes():
    """Compare with the same scatter without the inner fusion; TPU compilers emit sorted scatters like this."""
    wide, rows, ids = "f32[1024,512]{1,0}", "f32[2,512]{1,0}", "s32[2,1]{1,0}"
    put = (
        "scatter(%t, %i, %u), update_window_dims={1}, inserted_window_dims={0}, "
        "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add"
    )
    inner = (
        f"%inner (t: f32[1024,512], i: s32[2,1], u: f32[2,512]) -> f32[1024,512] {{\n  %t = {wide} parameter(0)\n"
        f"  %i = {ids} parameter(1)\n  %u = {rows} parameter(2)\n  ROOT %r = {wide} {put}\n}}\n\n"
    )
    found = []
    for root in (put, "fusion(%t, %i, %u), kind=kCustom, calls=%inner"):
        outer = (
            f"%outer (i: s32[2,1], u: f32[2,512]) -> f32[1024,512] {{\n  %i = {ids} parameter(0)\n"
            f"  %u = {rows} parameter(1)\n  %c = f32[] constant(0)\n  %t = {wide} broadcast(%c), dimensions={{}}\n"
            f"  ROOT %s = {wide} {root}\n}}\n"
        )
        arguments = f"  %i = {ids} parameter(0)\n  %u = {rows} parameter(1)\n"
        text = module(f"  ROOT %f = {wide} fusion(%i, %u), kind=kCustom, calls=%outer", inner + outer, arguments)
        found.append(work(text, "f").hbm_bytes)
    assert found[1] == found[0] > 1024 * 512 * 4


def test_a_fusion_writes_its_result_in_its_own_layout():
    """Write rows of 8 elements that fill tiles, as v5e's gathers do, though the kernel reshapes padded ones."""
    held = "bf16[4096,8]{0,1:T(8,128)(2,1)}"
    inside = (
        "%inside (p0: bf16[2,2048,8]) -> bf16[4096,8] {\n  %p0 = bf16[2,2048,8]{1,2,0:T(8,128)(2,1)} parameter(0)\n"
        f"  %n = bf16[2,2048,8]{{2,1,0:T(8,128)(2,1)}} negate(%p0)\n  ROOT %r = {held} reshape(%n)\n}}\n"
    )
    given = "  %p = bf16[2,2048,8]{1,2,0:T(8,128)(2,1)} parameter(0)\n"
    text = module(f"  ROOT %f = {held} fusion(%p), kind=kLoop, calls=%inside", inside, given)
    assert work(text, "f").hbm_bytes == 2 * 4096 * 8 * 2


def test_a_scatter_moves_its_rows_and_not_what_they_are_put_into():
    text = module(
        f"  ROOT %s = {BIG} scatter(%p, %i, %u), update_window_dims={{1}}, inserted_window_dims={{0}}, "
        "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add",
        parameters=f"  %p = {BIG} parameter(0)\n  %i = s32[64,1]{{1,0}} parameter(1)\n"
        f"  %u = bf16[64,4096]{T} parameter(2)\n",
    )
    assert work(text, "s").hbm_bytes == 3 * 64 * 4096 * 2 + 64 * 4


@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_gather_reads_a_row_as_often_as_it_is_gathered(scaled: bool):
    """Gather 4096 rows of 4 bf16 from a table of 16: each moves a burst of 64 bytes, also if the table is computed."""
    table = "%t = bf16[16,4]{1,0} multiply(%p0, %p0)" if scaled else "%t = bf16[16,4]{1,0} bitcast(%p0)"
    before = (
        "%inside (p0: bf16[16,4], p1: s32[4096,1]) -> bf16[4096,4] {\n  %p0 = bf16[16,4]{1,0} parameter(0)\n"
        f"  %p1 = s32[4096,1]{{1,0}} parameter(1)\n  {table}\n"
        "  %g = bf16[4096,4]{1,0} gather(%t, %p1), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, "
        "index_vector_dim=1, slice_sizes={1,4}\n  ROOT %n = bf16[4096,4]{1,0} negate(%g)\n}\n"
    )
    text = module(
        "  ROOT %f = bf16[4096,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%inside",
        before,
        "  %p = bf16[16,4]{1,0} parameter(0)\n  %i = s32[4096,1]{1,0} parameter(1)\n",
    )
    parsed = parse_hlo(text)
    owner = parsed.computations["main"]
    moved = Reader(parsed, burst_bytes=64).work(owner, owner.by_name["f"]).hbm_bytes
    assert moved == 4096 * 64 + 4096 * 4 + 4096 * 4 * 2


def test_a_matmul_reads_what_a_fusion_within_its_own_only_shows_in_another_shape():
    before = (
        f"%shown (a: bf16[4096,4096]) -> bf16[4096,4096] {{\n  %a = {BIG} parameter(0)\n"
        f"  ROOT %b = {BIG} bitcast(%a)\n}}\n\n"
        f"%fused (x: bf16[4096,4096], y: bf16[4096,4096]) -> bf16[4096,4096] {{\n"
        f"  %x = {BIG} parameter(0)\n  %y = {BIG} parameter(1)\n"
        f"  %left = {BIG} fusion(%x), kind=kLoop, calls=%shown\n"
        f"  ROOT {matmul('d', 'left', 'y').strip()}\n}}\n"
    )
    text = module(f"  ROOT %f = {BIG} fusion(%p, %q), kind=kOutput, calls=%fused", before)
    assert work(text, "f").hbm_bytes == 3 * SIZE


def test_what_lives_in_vmem_is_no_main_memory_traffic():
    text = module("  ROOT %c = bf16[4096,4096]{1,0:T(8,128)(2,1)S(1)} copy(%p)")
    assert (work(text, "c").hbm_bytes, work(text, "c").vmem_bytes) == (SIZE, SIZE)


def test_higher_precision_takes_more_passes():
    f32 = "f32[4096,4096]{1,0}"
    parameters = f"  %p = {f32} parameter(0)\n  %q = {f32} parameter(1)\n"

    def seconds(extra: str) -> float:
        line = f"  ROOT %d = {f32} dot(%p, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{extra}"
        return estimate(module(line, parameters=parameters), MESH).by_kind["matmul"]

    busy = float(COMPUTE.matmul_seconds(4096, 4096, 4096, dtype="f32"))
    assert seconds(", operand_precision={highest,highest}") == pytest.approx(seconds("") + 5 * busy)


def test_plans_that_differ_by_less_than_the_error_are_undecided():
    error = estimator_error()
    assert 0 < error.mean < error.within < 0.5 and 0 < error.pairs < 0.5 and error.source and error.pairs_source
    same = {"matmul": 0.9, "vector": 0.1}
    assert pair_error(same, same | {"matmul": 0.5}, 1.0) == error.pairs
    assert pair_error(same, same | {"vector": 0.3}, 2.0) == pytest.approx(error.pairs + 0.1)
    assert not decided(1.0, 1.0 - 0.9 * error.pairs, error.pairs)
    assert decided(1.0, 1.0 - 1.1 * error.pairs, error.pairs)


def test_what_no_published_run_spent_time_on_adds_to_the_error():
    measured = estimator_error().within
    large = estimate(module(matmul("d").replace("%d", "ROOT %d")), MESH)
    assert large.error == pytest.approx(measured + OVERHEAD / large.step_time_s)
    small = "f32[8,128]{1,0:T(8,128)}"
    tiny = estimate(module(f"  ROOT %c = {small} copy(%p)", parameters=f"  %p = {small} parameter(0)\n"), MESH)
    assert tiny.error > 0.9 and tiny.error <= 1.0


def test_the_timeline_adds_up_and_shows_links_during_compute():
    estimated = estimate(asynchronous(matmul("d")), MESH)
    own = [span for span in estimated.spans if span.lane in ("compute", "exposed")]
    assert sum(span.seconds for span in own) == pytest.approx(estimated.step_time_s)
    (sent,) = (span for span in estimated.spans if span not in own)
    assert sent.start_s == 0 and sent.name == "collective-permute over model: s"
    assert sent.seconds == pytest.approx(float(PRICES.time("collective-permute", ("model",), SIZE)))


def kernel(name: str, cost: str, operands: str = "%q, %k, %k") -> str:
    shapes = "  %q = bf16[2,4,1,1024,128] parameter(0)\n  %k = bf16[2,4,1024,128] parameter(1)\n"
    shapes += "  %whole = s8[1,1,1] parameter(2)\n  %window = s8[1,4,2] parameter(3)\n"
    shapes += "  %flat = s8[1,2,8] parameter(4)\n"
    call = (
        f'  ROOT %c = bf16[2,4,1,1024,128] custom-call({operands}), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"block":"512"\n}}, '
        f'metadata={{op_name="jit(f)/{name}/pallas_call"}}, backend_config={{"custom_call_config":{{{cost}}}}}'
    )
    return module(call, parameters=shapes)


def test_a_kernel_takes_what_it_says_of_itself():
    cost = '"cost_estimate":{"bytes_accessed":"1000","flops":"5000000000","transcendentals":"0"}'
    plain = estimate(kernel("mine", cost), MESH)
    assert plain.flops == 5e9
    assert plain.by_kind["kernel"] == pytest.approx(float(COMPUTE.op_seconds(5e9, 1000)))
    attention = estimate(kernel("splash_mqa_fwd", cost), MESH)
    steps = 5e9 / (4 * 128) / 512**2  # two matmuls over each block of 512 x 512 scores
    busy = COMPUTE.attention_seconds(5e9 / 256, 128, 128, 1, "bf16", 1000) + COMPUTE.step_seconds(steps)
    assert attention.by_kind["kernel"] == pytest.approx(float(busy))


@pytest.mark.parametrize(("table", "blocks", "sides"), [
    ("%whole", 1, (1024, 1024)),
    ("%window", 7, (256, 256)),  # all 4 x 4 blocks are within the two columns of the table
    ("%flat", 12, (512, 128)),  # causal: 4 and 8 of 8 blocks of keys
])  # fmt: skip
def test_the_blocks_of_splash_attention_are_identified_by_its_tables(table: str, blocks: int, sides: tuple[int, int]):
    scores = 8.0 * blocks * math.prod(sides)
    cost = f'"cost_estimate":{{"bytes_accessed":"1000","flops":"{scores * 4 * 128:.0f}","transcendentals":"0"}}'
    attention = estimate(kernel("splash_mqa_fwd", cost, f"{table}, %q, %k, %k"), MESH)
    busy = COMPUTE.attention_seconds(2.0 * scores, 128, 128, 1, "bf16", 1000)
    busy += COMPUTE.step_seconds(8.0 * blocks)
    assert attention.by_kind["kernel"] == pytest.approx(float(busy))


def test_an_attention_kernel_that_says_nothing_is_known_by_name_and_operands():
    assert estimate(kernel("splash_mqa_dkv_no_residuals", ""), MESH).flops == 8 * 2 * 4 * 1024 * 1024 * 128


def test_reserving_memory_takes_no_time():
    text = module(f'  ROOT %b = {BIG} custom-call(), custom_call_target="AllocateBuffer"')
    assert estimate(text, MESH).step_time_s == 0


def host_copies(compute: str) -> str:
    """Return a module that fetches two arrays from the host, computes in the meantime, and sends one back."""
    away = f"bf16[4096,4096]{T[:-1]}S(5)}}"
    start = f"(({away}), {BIG}, u32[]{{:S(2)}}) async-start"
    return module(
        f"  %f = {start}(%h), calls=%fetch\n  %g = {start}(%h), calls=%fetch\n{compute}"
        f"  %m = {BIG} async-done(%f)\n  %n = {BIG} async-done(%g)\n{matmul('x', 'm', 'n')}"
        f"  %s = ({away}, {BIG}, u32[]{{:S(2)}}) copy-start(%x)\n  ROOT %r = {away} copy-done(%s)",
        parameters=f"  %p = {BIG} parameter(0)\n  %q = {BIG} parameter(1)\n  %h = {away} parameter(2)\n",
    )


def test_what_comes_from_the_host_and_goes_there_shares_its_link():
    once = float(COMPUTE.host_seconds(SIZE))
    assert once > 2 * ONE
    alone, beside = estimate(host_copies(""), MESH), estimate(host_copies(matmul("d")), MESH)
    assert alone.step_time_s == pytest.approx(3 * once + ONE)
    assert alone.copy_s == alone.by_kind["copy"] == pytest.approx(3 * once)
    assert beside.step_time_s == pytest.approx(alone.step_time_s)  # computed while the first transfer runs
    assert not alone.traffic and alone.exposed_comm_s == 0


@pytest.mark.parametrize(
    ("dtype", "bits"), [("u1", 1), ("s1", 1), ("s2", 2), ("u4", 4), ("f4e2m1fn", 4), ("f8e5m2", 8), ("c64", 64)]
)
def test_dtypes_have_the_bits_of_their_names(dtype: str, bits: int):
    assert Shape(dtype, (64,)).bytes == 64 * bits // 8


def test_a_sparse_core_begins_with_the_operands_that_an_update_hands_over():
    """Time a gather on a sparse core from its update on: indices are read, and rows are read and written."""
    rows, ids, state = f"bf16[65536,128]{T}", "s32[65536]{0:T(1024)}", "((), (), (s32[8]{0:S(12)}))"
    held = f"(({BIG}, {ids}), {rows}, (s32[8]{{0:S(12)}}))"
    before = (
        f"%offloaded (t: {BIG}, i: {ids}) -> {rows} {{\n  %t = {BIG} parameter(0)\n  %i = {ids} parameter(1)\n"
        f'  ROOT %r = {rows} custom-call(%t, %i), custom_call_target="x"\n}}, execution_thread="sparsecore"\n'
    )

    def gather(between: str) -> str:
        return module(
            f"  %s = {state} async-start(), calls=%offloaded\n  %u = {held} async-update(%s, %p, %i)\n{between}"
            f"  ROOT %d = {rows} async-done(%u)",
            before,
            f"  %p = {BIG} parameter(0)\n  %q = {BIG} parameter(1)\n  %i = {ids} parameter(2)\n",
        )

    seconds = float(COMPUTE.memory_seconds(2 * 65536 * 128 * 2 + 65536 * 4))
    alone, beside = estimate(gather(""), MESH), estimate(gather(matmul("m")), MESH)
    assert alone.step_time_s == alone.copy_s == pytest.approx(seconds)
    assert beside.step_time_s == pytest.approx(max(seconds, ONE))
