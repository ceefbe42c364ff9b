"""Completeness of published runs, and the meaning of their rows."""

import json
import pathlib

import pytest

from autoshard.errors import UserError
from autoshard.program import KernelBlocks
from autoshard.validation import is_published
from autoshard.validation.published_runs import IncompleteError, MatmulRun, Run, parse_run, read_rows
from autoshard.validation.rebuilt_runs import source_group


ROWS = {row["id"]: row for row in read_rows()}
SMALL = {
    "id": "small", "model": "small", "dims": {"L": 2, "D": 256, "F": 512, "N": 4, "K": 4, "H": 64, "V": 512},
    "tpu": "v5e", "chips_per_slice": 16, "slices": 2, "topology": "4x4", "seq": 128, "per_chip_batch": 1,
    "sharding": "ICI FSDP=4,TP=4; DCN DP", "remat": "full", "value": 50.0, "metric": "MFU %", "step_time_s": None,
    "source": "someone/maxtext@0:README.md",
}  # fmt: skip


def run_of(**changes) -> Run:
    run = parse_run(SMALL | changes)
    assert isinstance(run, Run)
    return run


def test_shipped_rows_are_complete_or_say_why_not() -> None:
    whole = 0
    for row in ROWS.values():
        try:
            parse_run(row)
            whole += 1
        except IncompleteError as error:
            assert str(error)
    assert whole >= 36 and len(ROWS) == 62


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("ICI FSDP=4,TP=4; DCN DP", (2, 4, 4)),
        ("ICI FSDP=16; DCN DP", (2, 16, 1)),
        ("ICI FSDP=16; DCN FSDP", (1, 32, 1)),
        ("FSDP=32", (1, 32, 1)),
        ("FSDP_transpose=8,TP=4", (1, 8, 4)),
        ("FSDP=16", (2, 16, 1)),
        ("DP=32", (32, 1, 1)),
        ("2D SPMD mesh (data,model)=(8,4); as in a table", (1, 8, 4)),
    ],
)
def test_sharding(sharding: str, expected: tuple[int, int, int]) -> None:
    run = run_of(sharding=sharding)
    assert (run.copies, run.spread, run.tensor) == expected


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dims": None}, "the model's dims are not stated"),
        ({"dims": SMALL["dims"] | {"experts": 8}}, "dims of another family (experts)"),
        ({"seq": None, "remat": None}, "not stated: seq, remat"),
        ({"per_chip_batch": None}, "not stated: batch"),
        ({"tpu": None}, "no chip is named"),
        ({"tpu": "v9"}, "the chip v9 is not known"),
        ({"sharding": "EP=8"}, "the sharding 'EP=8' is not understood"),
        ({"sharding": "FSDP=5"}, "the sharding 'FSDP=5' does not make 32 devices"),
        ({"topology": "4x4x4 or so"}, "the topology '4x4x4 or so' is not a shape"),
        ({"topology": "5x5"}, "v5e has no shape 5x5"),
        ({"topology": "4x8"}, "16 chips a slice are stated, but 4x8 has 32"),
        ({"remat": "some"}, "remat 'some' is not known"),
        ({"value": None}, "neither a step time nor a rate is stated"),
    ],
)
def test_an_incomplete_row_says_what_is_missing(changes: dict, why: str) -> None:
    with pytest.raises(IncompleteError) as caught:
        parse_run(SMALL | changes)
    assert str(caught.value).startswith(why)


def test_step_time_from_a_rate_counts_attention_in_full() -> None:
    run = run_of()
    flops = run.flops(causal=False)
    assert run.batch == 32 and not run.assumed
    assert run.step_s == pytest.approx(flops / (0.5 * 197e12 * 32))
    assert run.flops(causal=True) < flops
    assert run_of(value=98.5, metric="TFLOP/s/chip").step_s == pytest.approx(run.step_s)
    assert run_of(step_time_s=2.0, value=None).step_s == 2.0


def test_a_step_time_and_a_rate_say_how_many_tokens_they_are_about() -> None:
    run = run_of()
    line = {"value": 98.5, "metric": "TFLOP/s/chip", "step_time_s": run.step_s}
    assert run_of(**line).batch == 32
    told = run_of(**line, per_chip_batch=3)
    assert told.batch == 32
    assert told.assumed == ("1 sequences a chip, which step time and rate imply, not 3",)


def test_a_topology_that_is_not_stated_is_that_of_the_slice() -> None:
    run = run_of(topology=None)
    assert run.topology.name == "v5e:4x4*2" and run.assumed == ("topology 4x4",)


def test_matmuls_and_local_attention() -> None:
    matmul = parse_run(ROWS["gemm-tpu7x-1024"])
    assert isinstance(matmul, MatmulRun)
    assert matmul.step_s == pytest.approx(2 * 1024**3 / 349.7e12)
    gemma = parse_run(ROWS["recipe-v6e-gemma3-12b-1x"])
    assert isinstance(gemma, Run)
    assert (gemma.decoder.window, gemma.decoder.global_every, gemma.decoder.tied) == (1024, 6, True)
    # The row's rate and step time agree with a causal count of FLOPs that respects the windows.
    stated = ROWS["recipe-v6e-gemma3-12b-1x"]
    assert stated["value"] * 1e12 * stated["step_time_s"] * 256 == pytest.approx(gemma.flops(causal=True), rel=0.02)


def test_sources_of_one_table_share_a_group() -> None:
    groups = {source_group(row["source"]) for row in ROWS.values()}
    assert "AI-Hypercomputer/maxtext: src/maxtext/configs/tpu/v5e" in groups
    assert "AI-Hypercomputer/tpu-recipes: training/trillium" in groups
    assert source_group("a blog post, 2023") == "a blog post, 2023"


def test_a_row_of_unknown_form_is_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([SMALL, {"id": "x", "metric": "MFU %"}]))
    assert is_published(file)
    with pytest.raises(UserError, match="row 1 of the published runs misses model, source, value"):
        read_rows(file)
    file.write_text(json.dumps([{"id": "x"}]))
    with pytest.raises(UserError, match="none of its rows is a published run .* or a worked question"):
        is_published(file)
    file.write_text("{}")
    with pytest.raises(UserError, match="holds no list of rows"):
        is_published(file)


def test_what_an_author_left_open_can_be_assumed_and_is_reported() -> None:
    row = ROWS["ptxla-gpt2-16b-fsdp"]
    assert row["dims"] is None
    run = parse_run(row)
    assert isinstance(run, Run)
    assert run.topology.num_chips == 32 and not run.flash
    assert run.decoder.params == pytest.approx(15.4e9, rel=0.01)
    # 39 % of peak by the post's own count, 50 PFLOP a step.
    assert run.flops(causal=False) == pytest.approx(50e15, rel=0.02)
    assert run.flops(causal=False) / (run.step_s * 32 * 275e12) == pytest.approx(0.39, abs=0.01)
    assert any("48 layers of width 5120" in text for text in run.assumed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq": "8k"}, "row 0 \\(small\\): seq is '8k', expected a number above 0, or null if it is not stated"),
        ({"value": -1}, "value is -1, expected a number above 0"),
        ({"slices": [2]}, "slices is \\[2\\], expected a number above 0"),
        ({"step_time_s": True}, "step_time_s is True, expected a number above 0"),
        ({"dims": 3}, "dims is 3, expected an object such as"),
        ({"dims": SMALL["dims"] | {"L": 1.5}}, "dims.L is 1.5, expected a whole number above 0"),
        ({"dims": SMALL["dims"] | {"gated": "no"}}, "dims.gated is 'no', expected true or false"),
        ({"assume": {"seq": "8k"}}, "seq is '8k', expected a number above 0"),
        ({"source": None}, "source is None, expected a text"),
        ({"xla_flags": "async"}, "xla_flags is 'async': 'async' is not an XLA flag"),
        ({"xla_flags": 3}, "xla_flags is 3: "),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path: pathlib.Path, changes: dict, message: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([SMALL | changes]))
    with pytest.raises(UserError, match=message) as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)


def test_bad_rows_are_named_and_the_others_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([3, SMALL | {"id": "wrong", "seq": "8k"}, SMALL]))
    assert is_published(path)
    bad: list[str] = []
    assert [row["id"] for row in read_rows(path, bad)] == ["small"]
    assert bad == [
        f"{path}, row 0 of the published runs misses id, metric, model, source, value",
        f"{path}, row 1 (wrong): seq is '8k', expected a number above 0, or null if it is not stated",
    ]


def test_a_row_says_its_compiler_flags() -> None:
    assert run_of().flags == () and run_of(xla_flags=None).flags == ()
    assert run_of(xla_flags="--xla_a=1 --xla_b").flags == ("--xla_a=1", "--xla_b=true")
    assert run_of(xla_flags=["--xla_a=1"]).flags == ("--xla_a=1",)
    stated = {name for name, row in ROWS.items() if row.get("xla_flags")}
    assert len(stated) >= 30 and all(ROWS[name]["flags_source"] for name in stated)


def test_a_row_says_which_attention_it_ran() -> None:
    assert run_of().flash and not run_of(attention="dot_product").flash
    assert not run_of(source="a blog").flash and run_of(source="a blog", attention="flash").flash
    with pytest.raises(IncompleteError, match="attention 'ring' is not known \\(flash, dot_product are\\)"):
        run_of(attention="ring")


def test_a_row_says_what_its_kernels_and_its_rematerialisation_were_set_to() -> None:
    run = run_of(saves=[], attention_blocks={"forward": [1024, 512], "fused": True})
    assert run.saves == () and run.blocks == KernelBlocks(forward=(1024, 512), fused=True)
    assert run_of().saves is None and run_of().blocks == KernelBlocks()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"saves": ["heads"]}, r"saves is \['heads'\], expected a list of query, key, value, out, context, gate, up"),
        ({"saves": [["query"]]}, r"saves is \[\['query'\]\], expected a list of query, key"),
        ({"saves": "query"}, "saves is 'query', expected a list of"),
        ({"attention_blocks": {"forward": 512}}, "attention_blocks is {'forward': 512}, expected an object such as"),
        ({"attention_blocks": {"ahead": [1, 1]}}, "attention_blocks is {'ahead': .*}, expected an object such as"),
        ({"attention_blocks": {"fused": 1}}, "attention_blocks is {'fused': 1}, expected an object such as"),
        ({"attention_blocks": [512]}, "attention_blocks is .512., expected an object such as"),
    ],
)
def test_settings_of_another_form_are_refused(tmp_path: pathlib.Path, changes: dict, message: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([SMALL | changes]))
    with pytest.raises(UserError, match=message):
        read_rows(path)
