"""The planned and the unplanned step in float64, which tell rounding from a fault."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autoshard import mlir
from autoshard.exec.apply.jax_application import Application, compile_lowered
from autoshard.exec.run.check_inputs import rounding_floor
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


_UNIT = 2.0**-52
"""One unit in the last place of float64, relative."""


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
        and regions, the other one is whole on every device. A result that is rounding noise in float64 too passes
        within the noise of the unplanned step. Steps with functions, values on the host or stages are not compared.
        """
        import jax

        functions = any(call.name != TOP_K for call in self._plan.calls)
        if functions or self._plan.host or self._plan.pipeline or not self._program.module:
            return "calls, host memory and stages have no float64 form"
        wide = [_wide(leaf) for leaf in leaves]
        try:
            with jax.enable_x64(True):
                if self._steps is None:
                    self._steps = [self._compiled(plan) for plan in (self._plan, replicated(self._plan))]
                planned, unplanned = (self._run(number, wide) for number in (0, 1))
                check = compare(self._program, planned, unplanned, EXACT, wide)
                if not check.passed:
                    whole = functools.partial(self._run, 1)
                    none = [0.0] * len(unplanned)
                    noise = rounding_floor(self._program, whole, wide, unplanned, none, unit=_UNIT)
                    check = compare(self._program, planned, unplanned, EXACT, wide, (noise, ""))
        except Exception as error:  # MLIR, XLA and JAX each refuse in their own words what has no form in float64
            self._steps = None
            return next(iter(str(error).splitlines()), "") or type(error).__name__
        return check, unplanned

    def _run(self, number: int, leaves: Sequence[Any]) -> list[Any]:
        """Run the planned step (0) or the unplanned one (1) and return its flat results as host arrays."""
        assert self._steps is not None
        step, shardings = self._steps[number]
        return [host_copy(value) for value in step(*map(place_copy, leaves, shardings))]

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
        # A typed key has a dtype of its own, which no name gives.
        keys = {str(leaf.dtype): leaf.dtype for leaf in jax.tree.leaves(self._program.args) if is_key(leaf)}
        results = [(r.shape, keys.get(r.dtype, wide.get(r.dtype, r.dtype))) for r in self._program.results]
        arguments = [
            jax.ShapeDtypeStruct(plan.shapes[name], keys.get(plan.dtypes[name], plan.dtypes[name]))
            for name in plan.arguments
        ]
        application = Application(plan)
        # The body of this stand-in is replaced by the module.
        lowered = application.lower(
            lambda *_: [jnp.zeros(*result) for result in results], arguments, (), mlir.to_bytes(module)
        )
        return compile_lowered(lowered), application.in_shardings()


def _wide(leaf: Any) -> Any:
    """Return a host copy of an argument, in float64 if it is a narrower float; a typed key as it is."""
    if is_key(leaf):
        return leaf
    array = np.asarray(leaf)
    return array.astype(np.float64) if array.dtype.name in mlir.NARROW else array
