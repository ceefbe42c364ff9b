"""Lowering of a JAX function without shardings; an error of the user's own code becomes one sentence."""

import dataclasses
import functools
import pathlib
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable
from typing import Any

from autoshard import mlir
from autoshard.errors import ENDINGS, UserError, reason_of
from autoshard.program.platforms import PLATFORMS, Lowerings


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """A step lowered for one platform."""

    jaxpr: Any
    """The open jaxpr of the step."""
    ir: Any
    """StableHLO, an `ir.Module`."""
    out_info: Any
    """Shapes and dtypes of the results, as the tree that the step returns."""
    platform: str
    """The platform of `ir`, one of `PLATFORMS`."""
    lowerings: Lowerings
    """Modules of the step by platform, that of `ir` included."""


def lower_function(fn: Callable[..., Any], args: tuple[Any, ...], donate: tuple[int, ...], label: str) -> Lowered:
    """Lower `fn(*args)` without shardings, for CPUs or else for the first platform that has a lowering.

    `donate` are the donated positional arguments, and `label` names the function in errors. Unused arguments stay
    arguments of the module. Raises `UserError` for an error of the function, and if no platform has a lowering.
    """
    import jax

    from autoshard.program.opaque_functions import lower_traced

    _leave_out_callers()

    def lower(platform: str) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            lowered = lower_traced(traced, platforms=(platform,))
        return mlir.drop_sent_arguments(lowered.compiler_ir("stablehlo"))

    def first() -> tuple[Any, str]:
        first_error: Exception | None = None
        for platform in PLATFORMS:
            try:
                return lower(platform), platform
            except UserError:
                raise
            except Exception as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    traced = user_code(label, lambda: jax.jit(fn, keep_unused=True, donate_argnums=donate).trace(*args))

    def module_for(other: str) -> bytes:
        module_there = lower(other)
        # Bytes may differ although the text is equal, and facts about a program are cached by its bytes.
        with mlir.new_context() as context:
            same = mlir.text_of(module_there) == mlir.text_of(mlir.parse_module(module, context))
        return module if same else mlir.to_bytes(module_there)

    ir, platform = user_code(label, first)
    module = mlir.to_bytes(ir)
    lowerings = Lowerings(module_for, {platform: module})
    return Lowered(traced.jaxpr.jaxpr, ir, traced.out_info, platform, lowerings)


_VALUES = {
    "ConcretizationTypeError",
    "NonConcreteBooleanIndexError",
    "TracerArrayConversionError",
    "TracerBoolConversionError",
    "TracerIntegerConversionError",
}
"""Errors of JAX for code that reads the values of a tensor when only its shape is known."""

_CALLERS = ("program/load.py", "program/trace_cache.py", "base/shared_results.py", "__init__.py", "__main__.py")
_CALLERS += tuple(f"{room}/" for room in ("cli", "degrees", "exec", "exports", "planning", "serving", "validation"))
"""Files and folders of this package that open programs, and that programs do not call."""


@functools.cache
def _leave_out_callers() -> None:
    """Leave the frames of `_CALLERS` out of the locations of ops, for the whole process.

    A program then has the same bytes under each command, so that facts cached by them are found again.
    """
    from jax._src import source_info_util

    for place in _CALLERS:
        source_info_util.register_exclusion(str(pathlib.Path(__file__).parents[1] / place))


def user_code(label: str, run: Callable[[], Any]) -> Any:
    """Call `run`, which runs the user's function, and return its result.

    Raises `UserError`, one sentence about the function `label`, for its errors. A `UserError` and an end of the process
    (`ENDINGS`) pass unchanged.
    """
    try:
        return run()
    except (UserError, *ENDINGS):
        raise
    except BaseException as error:
        check_backend(error)
        text = reason_of(error) or "no message"
        if text == "cuDNN is not detected":
            raise UserError(
                f"`{label}` uses implementation='cudnn', which JAX traces only where it finds cuDNN: trace it there "
                "and plan the StableHLO file (.lower().as_text(), `autoshard plan step.mlir`), or use 'xla'."
            ) from error
        pattern = r"(?:Not supported on|.*[Uu]nsupported \w+ device kind:) (.+?)\.?$"  # tokamax's, ejkernel's
        if message := re.match(pattern, text):
            raise UserError(
                f"`{label}` asks for a kernel that is not made for {message[1]}, where it is traced: choose an "
                "implementation in plain JAX (tokamax calls it 'xla'), or trace it on its accelerator and plan the "
                "StableHLO file (.lower().as_text(), `autoshard plan step.mlir`)."
            ) from error
        if "Non-hashable static arguments" in text:
            raise UserError(
                f"`{label}` is given a static argument without a hash, which jax.jit refuses: give a tuple or another "
                "value that has one, or bind it before, as in `lambda x: step(x, n)`."
            ) from error
        if "Differentiation rule for 'custom_partitioning'" in text:
            raise UserError(
                f"`{label}` takes the gradient of a function with a sharding rule, which has none of its own: put "
                "jax.custom_vjp around it, and register_rule on its backward function too."
            ) from error
        if message := re.match(r"Found an unbound axis name: (\S+?)\.?(?:\s|$)", text):
            raise UserError(
                f"`{label}` has a collective over the axis `{message[1]}`, which only an enclosing jax.pmap, "
                "jax.vmap or jax.shard_map binds: give the step over whole arrays without that collective (the plan "
                "adds sums), or enclosed in its own jax.shard_map or jax.vmap(axis_name=...)."
            ) from error
        place = _user_place(error)
        at = f" ({place})" if place else ""
        how = ""
        if asks_for_values(error):
            how = (
                "; plans are made from shapes alone: replace the `if`, `while`, mask index or numpy call that reads "
                "values by jax.lax.cond, jax.lax.while_loop or jnp.where"
            )
        raise UserError(f"`{label}` could not be traced by JAX: {type(error).__name__}: {text}{at}{how}.") from error


def asks_for_values(error: BaseException) -> bool:
    """Return True if the error is that code read the values of a tensor with only a shape."""
    return type(error).__name__ in _VALUES


def _user_place(error: BaseException) -> str:
    """Return `file.py:line` of the innermost frame outside of this package and of installed ones; empty if none is."""
    place, step = "", error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if is_users_file(name):
            place = f"{pathlib.Path(name).name}:{step.tb_lineno}"
        step = step.tb_next
    return place


def is_users_file(name: str) -> bool:
    """Return True for the file of code outside of this package and of installed ones."""
    return not name.startswith(_others())


@functools.cache
def _others() -> tuple[str, ...]:
    """Return the starts of names of files that are not the user's."""
    installed = [sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")]
    return (*(f"{folder}/" for folder in installed), f"{pathlib.Path(__file__).parents[1]}/", "<")


def check_backend(error: BaseException) -> None:
    """Raise `UserError` if `error` says that JAX cannot start a platform in `JAX_PLATFORMS`; ignore other errors."""
    jax = sys.modules.get("jax")
    asked = jax.config.jax_platforms if jax is not None else None
    if asked and ("Unable to initialize backend" in reason_of(error) or _is_bare(error)):
        raise UserError(
            f"JAX_PLATFORMS={asked} asks for devices that JAX cannot start here: leave it unset, or set it to `cpu`, "
            "which is enough to plan."
        ) from error


def _is_bare(error: BaseException) -> bool:
    """Return True if JAX raised an assertion without a message because it has no backend."""
    import jax

    if not isinstance(error, AssertionError) or error.args:
        return False
    try:
        jax.devices()
    except AssertionError:
        return True
    return False
