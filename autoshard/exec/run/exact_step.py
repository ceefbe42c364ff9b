"""The planned and the unplanned step in float64, which tell rounding from a fault."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autoshard import mlir
from autoshard.exec.apply.jax_application import Application, compile_lowered
from autoshard.exec.run.planned_steps import host_copy, is_key, place_copy
from autoshard.exec.run.result_check import EXACT, Check, compare
from autoshard.graph import TOP_K
from autoshard.planning import Plan, Spec
from autoshard.program import Program


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Run JAX on its CPU device, if it has one, and with float32 products in full precision, within the `with`
    block.
    """
    import jax

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def replicated(plan: Plan) -> Plan:
    """Return the plan with every argument and result whole on each device, and without pins, regions and calls."""
    return dataclasses.replace(
        plan,
        arguments={name: Spec.replicated(len(spec.dims)) for name, spec in plan.arguments.items()},
        results={name: Spec.replicated(len(spec.dims)) for name, spec in plan.results.items()},
        pins=(),
        regions=(),
        calls=(),
    )


_BITS = "bitcast_convert"
"""Name of the op that reads numbers as bits, or bits as numbers."""


class ExactSteps:
    """Planned and unplanned step of a program in float64, which are compiled at the first comparison."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self._program = program
        self._plan = plan
        self._steps: list[tuple[Any, tuple[Any, ...]]] | None = None

    def compare(self, leaves: Sequence[Any]) -> tuple[Check, list[Any]] | str:
        """Compare the results of both steps for flat arguments; return also those of the unplanned one.

        Return the reason if the steps are not compared in float64.

        Both run the module that was planned, with every float widened. The planned step has the plan's shardings, pins
        and regions, the other one is whole on every device. Steps with functions, values on the host or stages are
        not compared, nor steps that read the bits of floats, as random numbers do.
        """
        import jax

        functions = any(call.name != TOP_K for call in self._plan.calls)
        if functions or self._plan.host or self._plan.pipeline or not self._program.module:
            return "calls, host memory and stages have no float64 form"
        if any(is_key(leaf) for leaf in leaves):
            return "typed random keys have no float64 form"
        wide = [_wide(leaf) for leaf in leaves]
        try:
            with jax.enable_x64(True):
                if self._steps is None:
                    self._steps = [self._compiled(plan) for plan in (self._plan, replicated(self._plan))]
                planned, unplanned = (
                    [host_copy(value) for value in step(*map(place_copy, wide, shardings))]
                    for step, shardings in self._steps
                )
        except Exception as error:  # MLIR, XLA and JAX each refuse in their own words what has no form in float64
            self._steps = None
            if _BITS in str(mlir.parse_module(self._program.module)):
                return "the step reads the bits of numbers, as random draws do, which has no float64 form"
            return next(iter(str(error).splitlines()), "") or type(error).__name__
        return compare(self._program, planned, unplanned, EXACT, wide), unplanned

    def _compiled(self, plan: Plan) -> tuple[Any, tuple[Any, ...]]:
        """Return the step in float64 under a plan, over flat arguments, and the shardings of these."""
        import jax
        import jax.numpy as jnp

        module = mlir.parse_module(mlir.widened(mlir.parse_module(self._program.module)))
        wide = {dtype: "float64" for dtype in mlir.NARROW}
        plan = dataclasses.replace(
            plan,
            dtypes={name: wide.get(dtype, dtype) for name, dtype in plan.dtypes.items()},
            module_hash=mlir.structure_hash(mlir.inline_calls(module)),
        )
        results = [(r.shape, wide.get(r.dtype, r.dtype)) for r in self._program.results]
        arguments = [jax.ShapeDtypeStruct(plan.shapes[name], plan.dtypes[name]) for name in plan.arguments]
        application = Application(plan)
        # The body of this stand-in is replaced by the module.
        lowered = application.lower(
            lambda *_: [jnp.zeros(*result) for result in results], arguments, (), mlir.to_bytes(module)
        )
        return compile_lowered(lowered), application.in_shardings()


def _wide(leaf: Any) -> Any:
    """Return a host copy of an argument, in float64 if it is a narrower float."""
    array = np.asarray(leaf)
    return array.astype(np.float64) if array.dtype.name in mlir.NARROW else array
