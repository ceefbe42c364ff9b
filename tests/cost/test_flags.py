"""Compiler flags, and their effect on prices."""

import pathlib

import pytest

from autoshard.cost import chosen_flags, flag_set, load_calibration, load_chip, read_flags, save_calibration, with_flags
from autoshard.cost.compiler_flags import (
    CLOCK,
    FUSED_GATHERS,
    SPARSE_GATHERS,
    SPARSE_SCATTERS,
    SPARSE_SUMS,
    STATE_STEP,
    WINDOWED,
)
from autoshard.errors import UserError


SPARSE = f"--{SPARSE_GATHERS}=true --{SPARSE_SUMS}=true --{SPARSE_SCATTERS}=true"


def test_flags_are_read_as_the_compiler_reads_them() -> None:
    assert read_flags(None) == read_flags("") == read_flags([]) == ()
    assert read_flags(" --xla_a  --xla_b=2 --xla_a=false ") == ("--xla_b=2", "--xla_a=false")
    assert read_flags("--2a886c8_chip_config_name=megachip_tccontrol") == (
        "--2a886c8_chip_config_name=megachip_tccontrol",
    )
    assert read_flags(["--xla_a=1", "--xla_b=two words"]) == ("--xla_a=1", "--xla_b=two words")


@pytest.mark.parametrize("text", ["xla_a=1", "--xla_a=", "-xla_a", "--xla a", "--=1", "--xla_a='"])
def test_what_is_no_flag_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not an XLA flag; write them as --name=value|cannot be read") as caught:
        read_flags(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_fused_gathers_are_hidden_as_on_v5e(chip: str) -> None:
    base = load_calibration(chip)
    flagged = with_flags(base, read_flags(f"--{FUSED_GATHERS}"))
    assert base.gather_overlap < flagged.calibration.gather_overlap == load_calibration("v5e").gather_overlap
    assert flagged.figures == {"gather_overlap": flagged.calibration.gather_overlap}
    assert FUSED_GATHERS in flagged.priced[0] and flagged.notes == (
        f"libtpu 0.0.51 refuses --{FUSED_GATHERS} on {chip}; it is priced as on v5e.",
    )
    asynchronous = "--xla_enable_async_all_gather=false"
    assert not with_flags(base, read_flags(f"--{FUSED_GATHERS} {asynchronous}")).figures


def test_behaviour_of_a_generation_stays_until_it_is_removed() -> None:
    base = load_calibration("v5e")
    assert with_flags(base, read_flags(f"--{FUSED_GATHERS}")).calibration == base
    assert with_flags(base, read_flags(f"--{FUSED_GATHERS}=false")).calibration.gather_overlap == 0.0
    assert with_flags(base, read_flags("--xla_enable_async_all_gather=false")).calibration.gather_overlap == 0.0
    assert with_flags(base, read_flags(f"--{WINDOWED}=1000000")).calibration.pipelined_overlap == 0.0
    assert with_flags(base, read_flags(f"--{WINDOWED}=8")).calibration == base


def test_sparse_cores_hide_gathers_and_sums_where_there_are_some() -> None:
    for chip in ("v5p", "v6e"):
        flagged = with_flags(load_calibration(chip), read_flags(SPARSE))
        assert set(flagged.figures) == {"gather_overlap", "reduction_overlap"} and not flagged.notes
        assert flagged.calibration.hash() != load_calibration(chip).hash()
    (note,) = with_flags(load_calibration("v5e"), read_flags(SPARSE)).notes
    assert note.startswith("v5e has no SparseCores for collectives: ")
    assert with_flags(load_calibration("tpu7x"), read_flags(SPARSE)) == with_flags(load_calibration("tpu7x"), ())
    (note,) = with_flags(load_calibration("tpu7x"), read_flags(f"--{SPARSE_SUMS}=false")).notes
    assert note.startswith("tpu7x runs collectives on SparseCores by default; ")
    whole = with_flags(load_calibration("v5p"), read_flags(f"{SPARSE} --xla_tpu_prefer_async_allgather_to_allreduce"))
    assert whole.calibration.gather_max_group > 4096
    (note,) = with_flags(load_calibration("v5p"), read_flags(f"--{SPARSE_SUMS}")).notes
    assert note.startswith(f"--{SPARSE_SUMS} alone changes no price")


def test_a_lower_clock_slows_the_core_and_no_memory_or_link() -> None:
    figures = load_calibration("v5p")
    slow = with_flags(figures, [f"--{CLOCK}=3"])
    clock = 1 - 4 * STATE_STEP
    assert slow.calibration.matmul_efficiency == pytest.approx(clock * figures.matmul_efficiency)
    assert slow.calibration.op_overhead_s == pytest.approx(figures.op_overhead_s / clock)
    assert set(slow.figures) == {"matmul_efficiency", "vector_flops_per_s", "op_overhead_s", "grid_step_s"}
    assert not slow.notes
    assert with_flags(figures, [f"--{CLOCK}=7"]).figures == {}


def test_flags_that_are_not_in_the_price_are_named() -> None:
    base = load_calibration("v5e")
    flagged = with_flags(base, read_flags("--xla_tpu_scoped_vmem_limit_kib=65536 --xla_made_up=3"))
    assert flagged.calibration == base and not flagged.priced
    assert flagged.notes == ("flags without effect on the price: --xla_tpu_scoped_vmem_limit_kib, --xla_made_up.",)
    (note,) = with_flags(load_calibration("h100"), read_flags(SPARSE)).notes
    assert note == "XLA flags are not priced on h100: they are TPUs'."
    assert with_flags(base, ()).notes == ()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (f"--{FUSED_GATHERS}=perhaps", f"the XLA flag --{FUSED_GATHERS} is 'perhaps', expected true or false."),
        (f"--{WINDOWED}=many", f"the XLA flag --{WINDOWED} is 'many', expected a number."),
        (f"--{CLOCK}=8", f"the XLA flag --{CLOCK} is 8, expected a number from 0 to 7."),
    ],
)
def test_values_that_make_no_sense_are_refused(flag: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        with_flags(load_calibration("v6e"), read_flags(flag))
    assert str(caught.value) == message


def test_ones_own_figures_stand(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.json"
    save_calibration(mine, "v6e", {"gather_overlap": 0.3}, "my machine", "2026-01-02")
    monkeypatch.setenv("AUTOSHARD_CALIBRATION", str(mine))
    flagged = with_flags(load_calibration("v6e"), read_flags(f"--{FUSED_GATHERS}"))
    assert flagged.calibration.gather_overlap == 0.3 and not flagged.figures
    assert flagged.notes[0].startswith("your calibration file gives gather_overlap")


def test_sets_of_flags_have_names() -> None:
    v5p, v5e = load_chip("v5p"), load_chip("v5e")
    assert flag_set("default", v5p) == flag_set("default", load_chip("h100")) == ()
    for name in ("async", "sparsecore"):
        base = load_calibration("v5p")
        flagged = with_flags(base, flag_set(name, v5p))
        assert flagged.calibration.gather_overlap > base.gather_overlap
        assert read_flags(flag_set(name, v5p)) == flag_set(name, v5p)
    assert with_flags(load_calibration("v5p"), flag_set("sparsecore", v5p)).calibration.reduction_overlap > 0.9
    with pytest.raises(UserError, match="needs SparseCores for collectives, which v5e has not"):
        flag_set("sparsecore", v5e)
    with pytest.raises(UserError, match="the flag set 'async' is for TPUs; h100 has none"):
        flag_set("async", load_chip("h100"))
    with pytest.raises(UserError, match=r"'fast' is no set of compiler flags \(default, async, sparsecore are\)"):
        flag_set("fast", v5p)


def test_flags_come_from_who_says_them_first(monkeypatch: pytest.MonkeyPatch) -> None:
    v5p = load_chip("v5p")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_tpu_a=1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_b=2 --xla_tpu_a=3")
    assert chosen_flags(None, v5p) == (("--xla_b=2", "--xla_tpu_a=3"), "XLA_FLAGS and LIBTPU_INIT_ARGS")
    monkeypatch.setenv(
        "LIBTPU_INIT_ARGS", "TPU_MEGACORE=MEGACORE_DENSE --xla_b=2 --xla_tpu_a=3"
    )  # the spelling of EasyDeL
    assert chosen_flags(None, v5p) == (("--xla_b=2", "--xla_tpu_a=3"), "XLA_FLAGS and LIBTPU_INIT_ARGS")
    assert chosen_flags("--xla_c=1", v5p) == (("--xla_c=1",), "")
    assert chosen_flags("default", v5p) == ((), "default")
    assert chosen_flags(("async",), v5p) == (flag_set("async", v5p), "async")
    assert chosen_flags(None, load_chip("h100")) == chosen_flags(None, load_chip("cpu")) == ((), "")
    with pytest.raises(UserError, match="'fast' is not an XLA flag"):
        chosen_flags("fast", v5p)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_b='")
    with pytest.raises(UserError, match="the flags in LIBTPU_INIT_ARGS cannot be read"):
        chosen_flags(None, v5p)
