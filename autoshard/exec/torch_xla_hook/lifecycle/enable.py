"""Activation of auto-sharding in a process: the functions that replace PyTorch/XLA's own, and when."""

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.capture.compiled_modules import train_all_lazily
from autoshard.exec.torch_xla_hook.capture.composed_ops import compose_missing
from autoshard.exec.torch_xla_hook.capture.host_ops import keep_out_of_regions
from autoshard.exec.torch_xla_hook.capture.op_events import hidden_from_observers, tell_of_loop
from autoshard.exec.torch_xla_hook.capture.value_reads import read_whole
from autoshard.exec.torch_xla_hook.lifecycle.hook_session import Session
from autoshard.exec.torch_xla_hook.pins.compiled_regions import pin_regions
from autoshard.exec.torch_xla_hook.pins.input_placement import PlannedInputs, answer_here, watch_moves
from autoshard.exec.torch_xla_hook.planning.step_files import check_here
from autoshard.exec.torch_xla_hook.values.device_kernels import expand_norms, replace_lowerings
from autoshard.exec.torch_xla_hook.values.lazy_tensors import leaves, live_on_xla, xlac
from autoshard.exec.torch_xla_hook.values.live_marks import is_split, sharding_text


AUTO_VARIABLE = "XLA_AUTO_SPMD"
"""Environment variable that asks for auto-sharding."""

_VERSIONS = ("2.9",)
"""Versions of torch_xla that the hook works with."""
_NEEDED = (
    "_check_tensor_need_materialization",
    "_get_stablehlo",
    "_get_tensors_handle",
    "_get_tensors_xla_device_data_node",
    "_get_xla_sharding_spec",
    "_xla_annotate_custom_sharding",
    "_xla_clear_sharding",
    "_xla_get_cpu_tensors",
    "_xla_get_tensor_id",
    "_xla_mark_sharding",
    "_xla_step_marker",
    "_xla_sync_multi",
    "_xla_user_computation",
)
"""Functions of torch_xla's extension that the hook calls."""

_session: list[Session] = []
"""The session of this process, if there is one."""
_installed: list[Callable[..., None]] = []
"""Replacements of `use_spmd`, so that none is replaced again."""


def session() -> Session | None:
    """Return the auto-sharding session of this process; None until it is on."""
    return _session[0] if _session else None


def asked_by_environment() -> bool:
    """Return True if `XLA_AUTO_SPMD` is `1` or `true`, in any case; raise `UserError` for a value that is no answer."""
    return bool(answer_here(AUTO_VARIABLE, "to plan", "to run as without autoshard"))


def install() -> None:
    """Make `xr.use_spmd(auto=True)` and `XLA_AUTO_SPMD=1` turn on autoshard; nothing else changes until one is used.

    If the variable is set, auto-sharding is turned on here. A second call changes nothing.
    """
    import torch_xla.runtime as xr

    original = xr.use_spmd
    if original in _installed:
        return

    @functools.wraps(original)
    def use_spmd(auto: bool | None = False) -> None:
        """Turn on auto-sharding if `auto` or the environment asks for it, else only SPMD mode.

        Raises `UserError` as `enable` and `check_here` do.
        """
        if auto or asked_by_environment():
            enable(original)
            check_here()
        else:
            original()

    _installed.append(use_spmd)
    xr.use_spmd = use_spmd
    if asked_by_environment():
        enable(original)  # the import must not start the runtime, which would take the devices from child processes


def enable(use_spmd: Callable[[], None]) -> Session:
    """Turn SPMD mode and auto-sharding on; the next step is planned. Return the session, the same at every call.

    `use_spmd` turns SPMD mode on. Marks that tensors have already count as the script's own.

    Raises `UserError` for an unknown version of torch_xla. Raises it also if SPMD mode was off and the device was used
    already.
    """
    import torch_xla.runtime as xr

    if _session:
        return _session[0]
    check_version(importlib.metadata.version("torch_xla"), xlac())
    if not xr.is_spmd():
        _refuse_early_work()
        use_spmd()
    # The flag of the same name in C++ would turn buffer aliasing off and reshard parameters in every step.
    os.environ.pop(AUTO_VARIABLE, None)
    made = Session()
    made.marks.record(tensor for tensor in live_on_xla() if is_split(sharding_text(tensor)))
    _session.append(made)
    _stand_in(made)
    expand_norms()
    replace_lowerings()
    compose_missing()
    train_all_lazily()
    made.arm()
    return made


def _refuse_early_work() -> None:
    """Raise `UserError` if the device was used before SPMD mode: such data cannot be sharded, and may crash."""
    import torch_xla.debug.metrics as metrics

    early = live_on_xla()
    remedy = f"call xr.use_spmd(auto=True), or set {AUTO_VARIABLE}=1 before torch_xla is imported, before"
    if early:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in early[:3])
        raise UserError(
            f"{len(early)} tensors (of shapes {shapes}{', ...' if len(early) > 3 else ''}) were moved to the XLA "
            f"device before SPMD mode was on, where they cannot be sharded: {remedy} the model is moved."
        )
    if metrics.counter_value("ExecuteComputation"):
        raise UserError(f"something was computed on the XLA device before SPMD mode was on: {remedy} anything else.")


def check_version(version: str, extension: Any) -> None:
    """Raise `UserError` unless this is a torch_xla whose lazy graph the hook can read.

    - `version`: version of torch_xla.
    - `extension`: its extension module, which must have all of `_NEEDED`.
    """
    missing = [name for name in _NEEDED if not hasattr(extension, name)]
    if not version.startswith(tuple(f"{known}." for known in _VERSIONS)) or missing:
        lacks = f" and lacks {', '.join(missing)}" if missing else ""
        raise UserError(
            f"auto-sharding works with torch_xla {' and '.join(_VERSIONS)}; this is {version}{lacks}: "
            "install that version, or train without auto-sharding."
        )


def _stand_in(made: Session) -> None:
    """Replace the functions through which the session learns of step boundaries, moves, reads and optimizer steps.

    The replacements stay until the process ends.
    """
    import torch_xla.core.xla_model as xm
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    extension = xlac()
    step_marker = extension._xla_step_marker

    @functools.wraps(step_marker)
    def planned_step_marker(*args: Any, **kwargs: Any) -> Any:
        """Plan the pending graph or mark the state, then run PyTorch/XLA's own step marker."""
        made.on_sync()
        return step_marker(*args, **kwargs)

    extension._xla_step_marker = planned_step_marker
    extension._xla_get_auto_sharding = lambda: True
    made.marks.watch()
    register_optimizer_step_pre_hook(made.on_optimizer)
    watch_moves(made)
    _let_swap(made)
    read_whole(made.whole)
    _tell_of_scans()
    keep_out_of_regions()
    pin_regions(made.applied.pins_by_module, made.guard)
    send: Any = xm.send_cpu_data_to_device

    @functools.wraps(send)
    def send_planned(datas: Any, device: Any, input_sharding: Any = None) -> Any:
        """Send host data to the device with planned specs, or with those that the script gives, which count as its own
        marks.
        """
        if input_sharding is None:
            return send(datas, device, PlannedInputs(made.applied.batch_spec))
        sent = send(datas, device, input_sharding)
        made.marks.record(tensor for _, tensor in leaves(sent, ""))  # `sent` may be nested, such as a list of dicts
        return sent

    xm.send_cpu_data_to_device = send_planned


def _let_swap(made: Session) -> None:
    """Make `torch.utils.swap_tensors` work on tensors that the session refers to."""
    import torch

    utilities: Any = torch.utils
    swap = utilities.swap_tensors

    @functools.wraps(swap)
    def swap_tensors(one: Any, other: Any) -> None:
        """Swap two tensors while the session has no weak references to them."""
        with made.untracked(one, other):
            swap(one, other)

    utilities.swap_tensors = swap_tensors


def _tell_of_scans() -> None:
    """Report PyTorch/XLA's `scan` as one op; hide the ops that it runs to trace and lower its body."""
    scan = importlib.import_module("torch_xla.experimental.scan")
    for name in ("value_and_grad_partitioned", "_scan_impl_flat"):
        setattr(scan, name, hidden_from_observers(getattr(scan, name)))
    loop: Any = vars(scan)["_scan_impl_flat"]

    @functools.wraps(loop)
    def observed_scan(fn: Any, init: Any, xs: Any, reverse: bool = False) -> tuple[list[Any], list[Any]]:
        """Run a scan as one op with flat operands and results."""

        def flat(*args: Any) -> Sequence[Any]:
            """Run the scan on flat carries and inputs; return flat carries and outputs."""
            carry, ys = loop(fn, args[: len(init)], args[len(init) :], reverse=reverse)
            return *carry, *ys

        made = tell_of_loop(flat, (*init, *xs))
        return list(made[: len(init)]), list(made[len(init) :])

    vars(scan)["_scan_impl_flat"] = observed_scan
