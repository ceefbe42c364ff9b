"""Compiler flags of a step, and their effect on its price.

`with_flags` is the only place where flags change prices: plans of users and published runs both call it. It knows the
flags that make collectives asynchronous on each generation. For every other flag it notes that the price does not
include it.
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
"""Flag that fuses gathers with compute."""
_FUSION = "xla_tpu_enable_async_collective_fusion"
_ASYNC_GATHERS = "xla_enable_async_all_gather"
_SPARSE = "xla_tpu_enable_sparse_core_collective_offload_"
SPARSE_GATHERS, SPARSE_SUMS, SPARSE_SCATTERS = (_SPARSE + k for k in ("all_gather", "all_reduce", "reduce_scatter"))
"""Flags that run gathers, all-reduces and reduce-scatters on SparseCores."""
_KEPT_GATHERS = "xla_tpu_prefer_async_allgather_to_allreduce"
WINDOWED = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
"""Flag with the least MiB of an operand from which a matmul is pipelined with its collective."""

SPARSE_GATHER_SHARE, SPARSE_SUM_SHARE = 0.7, 0.95
"""Hidden shares of gathers and of sums on SparseCores. Fitted to no published run.

Evidence: docs/compiler_behaviour.md, "Collectives on SparseCores".
"""
FUSED_AS = "v5e"
"""The generation that fuses gathers with compute by default.

It is the only measure of that fusion, since libtpu 0.0.51 refuses the flag elsewhere.
"""
CLOCK = "xla_tpu_dvfs_p_state"
"""Flag with the state of a TPU's clock, from 0 to `HIGHEST_STATE`."""
HIGHEST_STATE, STATE_STEP = 7, 0.028
"""State of a TPU's highest clock, and the share of that clock by which each lower state is slower.

Fitted to two measured ratios on tpu7x and nothing else. The states of other generations are assumed to be as far apart.
Evidence: docs/compiler_behaviour.md, "Clock states of tpu7x".
"""
NEVER_MIB = 100_000
"""A threshold in MiB that no operand reaches: matmuls are not pipelined with their collectives."""

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
"""Flags that accompany the priced flags: they set how a collective becomes asynchronous, and not if it does."""

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
"""Flags that decide where collectives run, from the sets of MaxText's study of shard modes.

Source: docs/guides/optimization/shard_mode_performance.md, 2026.
"""

_NO_LIMIT = 1 << 30
"""A group size larger than that of any group."""
_ON, _OFF = ("true", "1", "yes", "enabled"), ("false", "0", "no", "disabled")


@dataclasses.dataclass(frozen=True, slots=True)
class Flagged:
    """A calibration with the changes that compiler flags make."""

    calibration: Calibration
    """The calibration after the changes."""
    figures: Mapping[str, float]
    """The figures that the flags changed, by name."""
    priced: tuple[str, ...]
    """A sentence for each changed figure."""
    notes: tuple[str, ...]
    """A sentence for each flag whose effect is not in the price, or that does nothing on the chip."""

    def record(self, flags: Iterable[str]) -> dict[str, Any]:
        """Return the record of `flags` for a plan's provenance: `flags`, changed `figures` and sentences (`priced`)."""
        return {"flags": list(flags), "figures": dict(self.figures), "priced": list(self.priced)}


def read_flags(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Read flags as `--name=value`, in the given order; the last value of a repeated flag counts.

    `given` is text as of `LIBTPU_INIT_ARGS`, or one text for each flag; None means no flags. A flag without a value is
    `true`, and a repeated flag stands at its last place. Raises: UserError for text that is no flag.
    """
    try:
        parts = shlex.split(given) if isinstance(given, str) else [str(each).strip() for each in given or ()]
    except ValueError as error:
        raise UserError(f"the XLA flags {given!r} cannot be read: {error}.") from error
    values: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.removeprefix("--").partition("=")
        if not part.startswith("--") or not re.fullmatch(r"\w+", name) or (equals and not value):
            raise UserError(
                f"{part!r} is not an XLA flag; write them as --name=value, as in LIBTPU_INIT_ARGS, with spaces "
                f"between, or name a set of them ({', '.join(FLAG_SETS)})."
            )
        values.pop(name, None)
        values[name] = value if equals else "true"
    return tuple(f"--{name}={value}" for name, value in values.items())


def flag_set(name: str, chip: Chip) -> tuple[str, ...]:
    """Return the flags that a name stands for on a chip.

    `default` has no flags. `async` makes gathers asynchronous, overlapped with the compute of a core. `sparsecore` runs
    gathers and sums on the chip's SparseCores. Raises: UserError for another name, and for a set that the chip cannot
    run.
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
    """Return the flags of a step, and their source: the name of a set, or of the variables that have flags, else "".

    `given` is the name of a set, or flags as `read_flags` reads them. Without `given`, a step for TPUs runs with the
    TPU flags of `XLA_FLAGS` and with those of `LIBTPU_INIT_ARGS`, which count more. Words such as `NAME=value` in
    the latter are left out. A step for another backend then has no flags. The source is "" for explicit flags, and
    if the variables have none. Raises: UserError as `read_flags` and `flag_set` do.
    """
    name = " ".join(given) if isinstance(given, list | tuple) and len(given) == 1 else given
    if isinstance(name, str) and name.strip() in FLAG_SETS:
        return flag_set(name.strip(), chip), name.strip()
    if given is not None:
        return read_flags(given), ""
    if not chip.traits.compiles_ahead:
        return (), ""
    general = [flag for flag in _words("XLA_FLAGS") if flag.startswith(("--xla_tpu_", "--xla_sc_", "--xla_jf_"))]
    # Some users write environment variables there too (`TPU_MEGACORE=...`), which are no flags.
    own = [word for word in _words("LIBTPU_INIT_ARGS") if not re.match(r"[A-Z][A-Z0-9_]*=", word)]
    variables = [name for name, found in (("XLA_FLAGS", general), ("LIBTPU_INIT_ARGS", own)) if found]
    return read_flags([*general, *own]), " and ".join(variables)


def _words(variable: str) -> list[str]:
    """Split the text of an environment variable like a shell. Raises: UserError if its quotes do not match."""
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise UserError(f"the flags in {variable} cannot be read: {error}.") from error


def with_flags(calibration: Calibration, flags: Iterable[str]) -> Flagged:
    """Return the figures of a chip for a step that is compiled with `flags` (of `read_flags`).

    A flag changes a figure in its own direction only: one that hides more never lowers a share that is larger
    already. A figure in the user's own calibration file overrides the flags. On GPUs and CPUs flags change nothing,
    are not checked, and give one note. Raises: UserError for a switch that is neither on nor off, a number that is
    none, and a clock state outside 0 to `HIGHEST_STATE`.
    """
    values = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    if not values:
        return Flagged(calibration, {}, (), ())
    chip = load_chip(calibration.chip)
    if not chip.traits.compiles_ahead:
        return Flagged(calibration, {}, (), (f"XLA flags are not priced on {calibration.chip}: they are TPUs'.",))
    effects = _effects(values, chip, calibration)
    own = own_figures(calibration.chip)
    figures, priced, notes = {}, [], []
    for figure, (value, why) in effects.items():
        unflagged = getattr(calibration, figure)
        if figure in own and value != unflagged:
            notes.append(f"your calibration file gives {figure}, so {why} does not change it.")
        elif value < unflagged and why.startswith("no ") or value > unflagged and not why.startswith("no "):
            figures[figure] = value
            priced.append(f"{figure} is {_shown(value)} instead of {_shown(unflagged)}: {why}.")
    changed = dataclasses.replace(
        calibration, **figures, sources={**calibration.sources, **{figure: effects[figure][1] for figure in figures}}
    )
    return Flagged(changed, figures, tuple(priced), (*notes, *_unpriced(values, chip)))


def _effects(settings: Mapping[str, str], chip: Chip, calibration: Calibration) -> dict[str, tuple[float, str]]:
    """Return each figure that the flags set: its value, and the reason as a sentence.

    Reasons that begin with `no` lower the figure, all others raise it. Raises: UserError as `with_flags` does.
    """
    rules: dict[str, tuple[float, str]] = {}
    sparse = chip.sparse_core_collectives == BY_FLAG
    asynchronous = _is_on(settings, _ASYNC_GATHERS, True)
    if (
        chip.sparse_core_collectives != NONE
        and asynchronous
        and _is_on(settings, SPARSE_GATHERS, not sparse)
        and _is_on(settings, _KEPT_GATHERS)
    ):
        rules["gather_max_group"] = (_NO_LIMIT, f"gathers stay gathers in any group (--{_KEPT_GATHERS})")
    if sparse and asynchronous and _is_on(settings, SPARSE_GATHERS):
        rules["gather_overlap"] = (SPARSE_GATHER_SHARE, f"gathers run on SparseCores (--{SPARSE_GATHERS})")
    elif asynchronous and _is_on(settings, FUSED_GATHERS) and _is_on(settings, _FUSION, True):
        share = load_calibration(chip if chip.fused_gathers == BY_DEFAULT else FUSED_AS).gather_overlap
        rules["gather_overlap"] = (share, f"gathers are fused with compute (--{FUSED_GATHERS})")
    elif not asynchronous:
        rules["gather_overlap"] = (0.0, f"no gather is asynchronous (--{_ASYNC_GATHERS})")
    elif chip.fused_gathers == BY_DEFAULT and not (
        _is_on(settings, FUSED_GATHERS, True) and _is_on(settings, _FUSION, True)
    ):
        rules["gather_overlap"] = (0.0, f"no gather is fused with compute (--{FUSED_GATHERS})")
    if sparse and _is_on(settings, SPARSE_SUMS) and _is_on(settings, SPARSE_SCATTERS):
        why = f"sums, and gathers that become sums, run on SparseCores (--{SPARSE_SUMS}, --{SPARSE_SCATTERS})"
        rules["reduction_overlap"] = (SPARSE_SUM_SHARE, why)
    state = _number(settings, CLOCK, HIGHEST_STATE)
    if not 0 <= state <= HIGHEST_STATE:
        raise UserError(f"the XLA flag --{CLOCK} is {settings[CLOCK]}, expected a number from 0 to {HIGHEST_STATE}.")
    if state < HIGHEST_STATE:
        clock = 1.0 - STATE_STEP * (HIGHEST_STATE - state)
        for figure in ("matmul_efficiency", "vector_flops_per_s"):
            rules[figure] = (clock * getattr(calibration, figure), f"no higher clock than that of --{CLOCK}={state:g}")
        for figure in ("op_overhead_s", "grid_step_s"):
            rules[figure] = (getattr(calibration, figure) / clock, f"at the clock of --{CLOCK}={state:g}")
    if _number(settings, WINDOWED, 0.0) >= NEVER_MIB:
        rules["pipelined_overlap"] = (0.0, f"no matmul is pipelined with its collectives (--{WINDOWED})")
    return rules


def _shown(value: float) -> str:
    """Format a figure's value for a sentence; `_NO_LIMIT` and above is `without limit`."""
    return "without limit" if value >= _NO_LIMIT else f"{value:g}"


def _unpriced(settings: Mapping[str, str], chip: Chip) -> list[str]:
    """Return a sentence for each effect of the flags that the price does not include, and one for all unknown flags."""
    notes = []
    wanted = [f"--{name}" for name in (SPARSE_GATHERS, SPARSE_SUMS, SPARSE_SCATTERS) if _is_on(settings, name)]
    sparse = chip.sparse_core_collectives
    if sparse == NONE and wanted:
        notes.append(f"{chip.name} has no SparseCores for collectives: {', '.join(wanted)} changes no price.")
    elif sparse == BY_DEFAULT and (
        off := [f"--{n}" for n in settings if n.startswith(_SPARSE) and not _is_on(settings, n)]
    ):
        notes.append(
            f"{chip.name} runs collectives on SparseCores by default; what {', '.join(off)} takes away has no price."
        )
    elif sparse != BY_DEFAULT and len({f"--{SPARSE_SUMS}", f"--{SPARSE_SCATTERS}"} & set(wanted)) == 1:
        one = next(flag for flag in wanted if flag != f"--{SPARSE_GATHERS}")
        notes.append(f"{one} alone changes no price: sums are priced as hidden if both kinds run on SparseCores.")
    if chip.fused_gathers == NONE and _is_on(settings, FUSED_GATHERS):
        notes.append(f"libtpu 0.0.51 refuses --{FUSED_GATHERS} on {chip.name}; it is priced as on {FUSED_AS}.")
    counted = {FUSED_GATHERS, SPARSE_GATHERS, SPARSE_SUMS, SPARSE_SCATTERS, WINDOWED, CLOCK} | _HELPERS
    other = [f"--{name}" for name in settings if name not in counted]
    if other:
        notes.append(f"flags without effect on the price: {', '.join(other)}.")
    return notes


def _is_on(settings: Mapping[str, str], name: str, otherwise: bool = False) -> bool:
    """Return True if a flag is on; `otherwise` if it is absent. Raises: UserError for a value that is no boolean.

    `true`, `1`, `yes` and `enabled` are on, in upper or lower case.
    """
    value = settings.get(name)
    if value is None:
        return otherwise
    if value.lower() not in (*_ON, *_OFF):
        raise UserError(f"the XLA flag --{name} is {value!r}, expected true or false.")
    return value.lower() in _ON


def _number(settings: Mapping[str, str], name: str, otherwise: float) -> float:
    """Return a flag's number; `otherwise` if it is absent. Raises: UserError for a value that is no number."""
    try:
        return float(settings.get(name, otherwise))
    except ValueError:
        raise UserError(f"the XLA flag --{name} is {settings[name]!r}, expected a number.") from None
