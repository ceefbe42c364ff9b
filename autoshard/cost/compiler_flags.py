"""Compiler flags that a step will run with, and what they change in its price.

`with_flags` is the one place where flags meet prices: plans of users and published runs both go through it. It knows
which flags make collectives asynchronous on which generation; of all others it says that they are not in the price.
"""

import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from autoshard.cost.calibration import Calibration, load_calibration, own_figures
from autoshard.cost.chip import BY_DEFAULT, BY_FLAG, NONE, Chip, load_chip
from autoshard.errors import UserError


FUSED_GATHERS = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
_FUSION = "xla_tpu_enable_async_collective_fusion"
_ASYNC_GATHERS = "xla_enable_async_all_gather"
_SPARSE = "xla_tpu_enable_sparse_core_collective_offload_"
SPARSE_GATHERS, SPARSE_SUMS, SPARSE_SCATTERS = (_SPARSE + k for k in ("all_gather", "all_reduce", "reduce_scatter"))
_KEPT_GATHERS = "xla_tpu_prefer_async_allgather_to_allreduce"
WINDOWED = "xla_jf_spmd_threshold_for_windowed_einsum_mib"

SPARSE_GATHER_SHARE, SPARSE_SUM_SHARE = 0.7, 0.95
"""Hidden shares of gathers and of sums on SparseCores in schedules of libtpu 0.0.51, 0 without the flags: 64 and 100 %
of an MLP with FSDP on v5p:2x2x2 (`overlap_by_compiler_flags.py`), 78 and 94 % of a decoder of 12 layers on
v5p:2x2x1. Fitted to no published run."""
FUSED_AS = "v5e"
"""The generation that fuses gathers with compute by itself: the only measure of it, since libtpu 0.0.51 refuses the
flag elsewhere."""
CLOCK = "xla_tpu_dvfs_p_state"
HIGHEST_STATE, STATE_STEP = 7, 0.028
"""The state of a TPU's highest clock, and the share of it by which each state below is slower. Measured steps of a
mixture on 64 tpu7x chips are 1.035 and 1.086 times as long at states 5 and 3 as at 7 (Hunyuan3-295B, the group
hy3-295b-v7x64-bf16-mesh-clock of the measured pairs): fitted to these two ratios and nothing else. Other generations'
states are assumed to be as far apart."""
NEVER_MIB = 100_000
"""A threshold that no operand reaches: matmuls are not pipelined with their collectives."""

_HELPERS = {
    *(_FUSION, _ASYNC_GATHERS, "xla_tpu_enable_async_collective_fusion_multiple_steps", _KEPT_GATHERS),
    *("xla_tpu_overlap_compute_collective_tc", "xla_max_concurrent_async_all_gathers"),
    *("xla_tpu_enable_async_pincer_emitter", "xla_enable_async_collective_permute"),
    *("xla_tpu_enable_data_parallel_all_reduce_opt", "xla_tpu_data_parallel_opt_different_sized_ops"),
    *("xla_tpu_enable_ag_backward_pipelining", "xla_tpu_megacore_fusion_allow_ags"),
    *(_SPARSE + kind for kind in ("2d_all_gather", "3d_all_gather", "nd_reduce_scatter")),
    *("xla_tpu_enable_sparse_core_reduce_scatter_v2", "xla_tpu_enable_all_gather_offload_tracing"),
    *("xla_tpu_enable_all_reduce_offload_tracing", "xla_tpu_use_tc_device_shape_on_sc"),
    *("xla_sc_disable_megacore_partitioning", "xla_tpu_enable_concurrent_sparse_core_offloading"),
}
"""Flags that go with those that count: how a collective is made asynchronous, not whether."""

FLAG_SETS = ("default", "async", "sparsecore")
"""Names that may stand for flags, see `flag_set`."""
_ASYNC_SET = (
    f"--{_ASYNC_GATHERS}=true",
    "--xla_max_concurrent_async_all_gathers=16",
    f"--{FUSED_GATHERS}=true",
    "--xla_tpu_enable_async_pincer_emitter=true",
)
_SPARSE_SET = (
    f"--{FUSED_GATHERS}=false",
    f"--{_ASYNC_GATHERS}=true",
    f"--{_KEPT_GATHERS}=true",
    *(f"--{name}=true" for name in (SPARSE_GATHERS, SPARSE_SUMS, SPARSE_SCATTERS)),
)
"""Of the sets of MaxText's study of shard modes (docs/guides/optimization/shard_mode_performance.md, 2026) those that
decide where collectives run."""

_NO_LIMIT = 1 << 30
"""A group that is larger than any."""
_ON, _OFF = ("true", "1", "yes", "enabled"), ("false", "0", "no", "disabled")


@dataclasses.dataclass(frozen=True, slots=True)
class Flagged:
    """Figures as flags change them."""

    calibration: Calibration
    figures: Mapping[str, float]
    """The figures that the flags changed, by name."""
    priced: tuple[str, ...]
    """A sentence for each change."""
    notes: tuple[str, ...]
    """A sentence for each flag whose effect is not in the price, or that does nothing on the chip."""

    def said(self, flags: Iterable[str]) -> dict[str, Any]:
        """What the provenance of a plan made for `flags` says of them: its program is compiled with them."""
        return {"flags": list(flags), "figures": dict(self.figures), "priced": list(self.priced)}


def read_flags(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Flags as `--name=value`, in the order given; a flag that is said twice counts as it was said last.

    `given` is text as of `LIBTPU_INIT_ARGS`, or one text for each flag. Raises: UserError for what is no flag.
    """
    try:
        parts = shlex.split(given) if isinstance(given, str) else [str(each).strip() for each in given or ()]
    except ValueError as error:
        raise UserError(f"the XLA flags {given!r} cannot be read: {error}.") from error
    found: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.removeprefix("--").partition("=")
        if not part.startswith("--") or not re.fullmatch(r"\w+", name) or (equals and not value):
            raise UserError(
                f"{part!r} is not an XLA flag; write them as --name=value, as in LIBTPU_INIT_ARGS, with spaces "
                f"between, or name a set of them ({', '.join(FLAG_SETS)})."
            )
        found.pop(name, None)
        found[name] = value if equals else "true"
    return tuple(f"--{name}={value}" for name, value in found.items())


def flag_set(name: str, chip: Chip) -> tuple[str, ...]:
    """The flags that a name stands for on a chip.

    `default` is what the compiler does without flags; `async` makes gathers asynchronous beside the compute of a core;
    `sparsecore` runs gathers and sums on the chip's SparseCores. Raises: UserError for another name, and for a set that
    the chip cannot run.
    """
    if name not in FLAG_SETS:
        raise UserError(f"{name!r} is no set of compiler flags ({', '.join(FLAG_SETS)} are), and no --name=value.")
    if name == "default":
        return ()
    if not chip.traits.compiles_ahead:
        raise UserError(f"the flag set {name!r} is for TPUs; {chip.name} has none of its flags.")
    if name == "async":
        return _ASYNC_SET
    if chip.sparse_core_collectives == NONE:
        raise UserError(f"the flag set 'sparsecore' needs SparseCores for collectives, which {chip.name} has not.")
    return _SPARSE_SET


def chosen_flags(given: str | Iterable[str] | None, chip: Chip) -> tuple[tuple[str, ...], str]:
    """The flags of a step, and where they come from: a set's name, a variable's, or nothing where they were written.

    Without any given, a step for TPUs runs with those of `LIBTPU_INIT_ARGS` and with TPUs' flags of `XLA_FLAGS`.
    Raises: UserError as `read_flags` and `flag_set` do.
    """
    name = " ".join(given) if isinstance(given, list | tuple) and len(given) == 1 else given
    if isinstance(name, str) and name.strip() in FLAG_SETS:
        return flag_set(name.strip(), chip), name.strip()
    if given is not None:
        return read_flags(given), ""
    if not chip.traits.compiles_ahead:
        return (), ""
    general = [flag for flag in _words("XLA_FLAGS") if flag.startswith(("--xla_tpu_", "--xla_sc_", "--xla_jf_"))]
    # Some write variables of the environment there too (`TPU_MEGACORE=...`), which are no flags.
    own = [word for word in _words("LIBTPU_INIT_ARGS") if not re.match(r"[A-Z][A-Z0-9_]*=", word)]
    variables = [name for name, found in (("XLA_FLAGS", general), ("LIBTPU_INIT_ARGS", own)) if found]
    return read_flags([*general, *own]), " and ".join(variables)


def _words(variable: str) -> list[str]:
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise UserError(f"the flags in {variable} cannot be read: {error}.") from error


def with_flags(calibration: Calibration, flags: Iterable[str]) -> Flagged:
    """The figures of a chip for a step that is compiled with `flags` (of `read_flags`).

    A figure in the user's own calibration file stands whatever the flags say. Raises: UserError for a flag that should
    be on or off and is neither, or a number and is none.
    """
    said = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    if not said:
        return Flagged(calibration, {}, (), ())
    chip = load_chip(calibration.chip)
    if not chip.traits.compiles_ahead:
        return Flagged(calibration, {}, (), (f"XLA flags are not priced on {calibration.chip}: they are TPUs'.",))
    effects = _effects(said, chip, calibration)
    own = own_figures(calibration.chip)
    figures, priced, notes = {}, [], []
    for figure, (value, why) in effects.items():
        now = getattr(calibration, figure)
        if figure in own and value != now:
            notes.append(f"your calibration file gives {figure}, so {why} does not change it.")
        elif value < now and why.startswith("no ") or value > now and not why.startswith("no "):
            figures[figure] = value
            priced.append(f"{figure} is {_shown(value)} instead of {_shown(now)}: {why}.")
    changed = dataclasses.replace(
        calibration, **figures, sources={**calibration.sources, **{figure: effects[figure][1] for figure in figures}}
    )
    return Flagged(changed, figures, tuple(priced), (*notes, *_unpriced(said, chip)))


def _effects(said: Mapping[str, str], chip: Chip, calibration: Calibration) -> dict[str, tuple[float, str]]:
    """Figure -> its value, and what makes it so; sentences that begin with `no` take away, the others give."""
    found: dict[str, tuple[float, str]] = {}
    sparse = chip.sparse_core_collectives == BY_FLAG
    asynchronous = _is_on(said, _ASYNC_GATHERS, True)
    if (
        chip.sparse_core_collectives != NONE
        and asynchronous
        and _is_on(said, SPARSE_GATHERS, not sparse)
        and _is_on(said, _KEPT_GATHERS)
    ):
        found["gather_max_group"] = (_NO_LIMIT, f"gathers stay gathers in any group (--{_KEPT_GATHERS})")
    if sparse and asynchronous and _is_on(said, SPARSE_GATHERS):
        found["gather_overlap"] = (SPARSE_GATHER_SHARE, f"gathers run on SparseCores (--{SPARSE_GATHERS})")
    elif asynchronous and _is_on(said, FUSED_GATHERS) and _is_on(said, _FUSION, True):
        share = load_calibration(chip if chip.fused_gathers == BY_DEFAULT else FUSED_AS).gather_overlap
        found["gather_overlap"] = (share, f"gathers are fused with compute (--{FUSED_GATHERS})")
    elif not asynchronous:
        found["gather_overlap"] = (0.0, f"no gather is asynchronous (--{_ASYNC_GATHERS})")
    elif chip.fused_gathers == BY_DEFAULT and not (_is_on(said, FUSED_GATHERS, True) and _is_on(said, _FUSION, True)):
        found["gather_overlap"] = (0.0, f"no gather is fused with compute (--{FUSED_GATHERS})")
    if sparse and _is_on(said, SPARSE_SUMS) and _is_on(said, SPARSE_SCATTERS):
        why = f"sums, and gathers that become sums, run on SparseCores (--{SPARSE_SUMS}, --{SPARSE_SCATTERS})"
        found["reduction_overlap"] = (SPARSE_SUM_SHARE, why)
    state = _number(said, CLOCK, HIGHEST_STATE)
    if not 0 <= state <= HIGHEST_STATE:
        raise UserError(f"the XLA flag --{CLOCK} is {said[CLOCK]}, expected a number from 0 to {HIGHEST_STATE}.")
    if state < HIGHEST_STATE:
        clock = 1.0 - STATE_STEP * (HIGHEST_STATE - state)
        for figure in ("matmul_efficiency", "vector_flops_per_s"):
            found[figure] = (clock * getattr(calibration, figure), f"no higher clock than that of --{CLOCK}={state:g}")
        for figure in ("op_overhead_s", "grid_step_s"):
            found[figure] = (getattr(calibration, figure) / clock, f"at the clock of --{CLOCK}={state:g}")
    if _number(said, WINDOWED, 0.0) >= NEVER_MIB:
        found["pipelined_overlap"] = (0.0, f"no matmul is pipelined with its collectives (--{WINDOWED})")
    return found


def _shown(value: float) -> str:
    return "without limit" if value >= _NO_LIMIT else f"{value:g}"


def _unpriced(said: Mapping[str, str], chip: Chip) -> list[str]:
    """What flags do that is not in the price."""
    notes = []
    wanted = [f"--{name}" for name in (SPARSE_GATHERS, SPARSE_SUMS, SPARSE_SCATTERS) if _is_on(said, name)]
    sparse = chip.sparse_core_collectives
    if sparse == NONE and wanted:
        notes.append(f"{chip.name} has no SparseCores for collectives: {', '.join(wanted)} changes no price.")
    elif sparse == BY_DEFAULT and (off := [f"--{n}" for n in said if n.startswith(_SPARSE) and not _is_on(said, n)]):
        notes.append(
            f"{chip.name} runs collectives on SparseCores by default; what {', '.join(off)} takes away has no price."
        )
    elif sparse != BY_DEFAULT and len({f"--{SPARSE_SUMS}", f"--{SPARSE_SCATTERS}"} & set(wanted)) == 1:
        one = next(flag for flag in wanted if flag != f"--{SPARSE_GATHERS}")
        notes.append(f"{one} alone changes no price: sums are priced as hidden if both kinds run on SparseCores.")
    if chip.fused_gathers == NONE and _is_on(said, FUSED_GATHERS):
        notes.append(f"libtpu 0.0.51 refuses --{FUSED_GATHERS} on {chip.name}; it is priced as on {FUSED_AS}.")
    counted = {FUSED_GATHERS, SPARSE_GATHERS, SPARSE_SUMS, SPARSE_SCATTERS, WINDOWED, CLOCK} | _HELPERS
    other = [f"--{name}" for name in said if name not in counted]
    if other:
        notes.append(f"not in the price, whatever it does: {', '.join(other)}.")
    return notes


def _is_on(said: Mapping[str, str], name: str, otherwise: bool = False) -> bool:
    value = said.get(name)
    if value is None:
        return otherwise
    if value.lower() not in (*_ON, *_OFF):
        raise UserError(f"the XLA flag --{name} is {value!r}, expected true or false.")
    return value.lower() in _ON


def _number(said: Mapping[str, str], name: str, otherwise: float) -> float:
    try:
        return float(said.get(name, otherwise))
    except ValueError:
        raise UserError(f"the XLA flag --{name} is {said[name]!r}, expected a number.") from None
