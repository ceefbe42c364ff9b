"""Compiled planned step that consumes its own results: every measurement runs one."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.cost import FRACTION, Topology, fraction_for
from autoshard.errors import UserError
from autoshard.exec.apply.jax_application import Application, compile_lowered
from autoshard.exec.devices.local_devices import check_granted, place, retained_memory
from autoshard.planning import Plan
from autoshard.program import Program


class PlannedStep:
    """Program compiled under a plan for the devices present, with the arguments of its next step.

    - `made`: host arrays of the first step's arguments, in the program's tree.

    The constructor compiles. It raises the runtime's own errors, which `failure` converts into a `UserError`, and
    `UserError` if the step needs more memory than JAX may use.
    """

    def __init__(self, program: Program, plan: Plan, made: tuple[Any, ...]) -> None:
        import jax

        self._program = program
        self._first, self._tree = jax.tree.flatten(made)
        self.application = Application(plan)
        start = time.perf_counter()
        lowered = self.application.lower(program.fn, program.args, program.donate_argnums, program.module)
        self.compiled = compile_lowered(lowered)
        check_granted(plan, self.compiled, self.application.mesh.devices.flat)
        self.compile_s = time.perf_counter() - start
        self._shardings = self.application.in_shardings()
        self._current: list[Any] = []

    def place(self) -> None:
        """Copy the first step's arguments to the devices, so that the next `run` begins with them."""
        self._current = [
            place_copy(leaf, sharding) for leaf, sharding in zip(self._first, self._shardings, strict=True)
        ]

    def run(self) -> tuple[float, list[Any]]:
        """Run one step; return its seconds and flat results, which are complete. The next step consumes the updated
        state.

        Placement is not timed.
        """
        import jax

        if not self._current:
            self.place()
        jax.block_until_ready(self._current)
        start = time.perf_counter()
        out = self.compiled(*self._tree.unflatten(self._current))
        jax.block_until_ready(out)
        elapsed = time.perf_counter() - start
        results = jax.tree.leaves(out)
        self._current = self._next(results)
        return elapsed, results

    def run_once(self, leaves: Sequence[Any]) -> list[Any]:
        """Run one step from other flat arguments; return its flat results, perhaps before they are complete.

        The next `run` uses the first arguments again.
        """
        import jax

        self._current = []  # the arguments of two steps may exceed device memory
        placed = [place_copy(leaf, sharding) for leaf, sharding in zip(leaves, self._shardings, strict=True)]
        return jax.tree.leaves(self.compiled(*self._tree.unflatten(placed)))

    @property
    def platform(self) -> str:
        """Platform of the devices: `cpu`, `gpu` or `tpu`."""
        return self.application.mesh.devices.flat[0].platform

    def _next(self, results: list[Any]) -> list[Any]:
        """Return the next step's arguments: updated state, and arguments that are still alive.

        A donated argument that no result updates is placed again.
        """
        following = []
        for i, argument in enumerate(self._program.arguments):
            if argument.result is not None:
                following.append(results[argument.result])
            elif self._current[i].is_deleted():
                following.append(place_copy(self._first[i], self._shardings[i]))
            else:
                following.append(self._current[i])
        return following


class StagedRun(PlannedStep):
    """Program that runs as a program for each stage; the parts are compiled by one step before the first.

    - `made`: host arrays of the first step's arguments, in the program's tree.

    Raises `UserError` for another program than the planned one.
    """

    def __init__(self, program: Program, plan: Plan, made: tuple[Any, ...]) -> None:
        import jax

        self._program = program
        self._first, self._tree = jax.tree.flatten(made)
        self.application = Application(plan)
        start = time.perf_counter()
        self.compiled = self.application.jit(program)
        self._shardings = tuple(jax.tree.leaves(self.compiled.shardings(*made)))
        self._current: list[Any] = []
        self.run()
        self.compile_s = time.perf_counter() - start
        self._current = []


def first_arguments(program: Program, seed: int) -> tuple[Any, ...]:
    """Return the program's example arguments as host arrays: a donated step would consume the caller's arrays.

    A program without `make_args` has ones. Typed random keys stay device arrays.
    """
    import jax

    made = program.make_args(seed) if program.make_args is not None else _ones(program.args)
    return jax.tree.map(
        lambda leaf: host_copy(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf) else leaf, made
    )


def place_copy(leaf: Any, sharding: Any) -> Any:
    """Copy an argument of the first step to the devices, in new memory, since the step may donate it."""
    import jax

    # Only keys are device arrays. A key may already have the sharding, and then would not be copied.
    if isinstance(leaf, jax.Array) and is_key(leaf) and leaf.is_fully_addressable:
        leaf = jax.random.wrap_key_data(host_copy(leaf), impl=jax.random.key_impl(leaf))
    return place(leaf, sharding)


def host_copy(value: Any) -> Any:
    """Copy a whole array to the host as a numpy array, gathered from all processes; typed keys give their key data."""
    import jax
    import numpy as np

    if is_key(value):
        value = jax.random.key_data(value)
    if not value.is_fully_addressable:
        from jax.experimental import multihost_utils

        value = multihost_utils.process_allgather(value, tiled=True)
    return np.array(value)


def is_key(value: Any) -> bool:
    """Return True for an array of JAX's typed random keys; any other array gives False."""
    import jax
    import jax.numpy as jnp

    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def failure(plan: Plan, error: Exception) -> UserError:
    """Return the runtime's error of a planned step as a `UserError` of one sentence, with its first 200 characters.

    For exhausted memory it names the environment variable that would grant more, if that would do.
    """
    exhausted = "RESOURCE_EXHAUSTED" in str(error)
    what = "ran out of memory" if exhausted else "failed"
    first = " ".join(str(error).split())[:200]
    fraction = fraction_for(Topology.parse(plan.topology), plan.prediction.peak_bytes) if exhausted else None
    hint = "" if fraction is None else f" (JAX takes 75% of a GPU unless {FRACTION}={fraction:.2f} says more)"
    return UserError(f"{plan.program_name} {what} on the devices here{hint}: {first}")


def run_in_turn(
    steps: Mapping[str, PlannedStep],
    *,
    rounds: int,
    warmup: int = 2,
    seconds: float = math.inf,
) -> dict[str, list[float]]:
    """Time every step in every round, one run of each in turn, so that all steps see the same state of the machine.

    - `rounds`: most rounds, and so most times of a step.
    - `warmup`: untimed runs of each step before them.
    - `seconds`: time after which no further round begins; three rounds always run, if `rounds` allows.

    Returns the seconds of every run by name of the step. Every second round runs backwards, because a step leaves its
    data in caches for its neighbour.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    with retained_memory():
        for step in steps.values():
            for _ in range(warmup):
                step.run()
        began = time.perf_counter()
        for number in range(rounds):
            for name in list(steps)[:: -1 if number % 2 else 1]:
                times[name].append(steps[name].run()[0])
            if number >= 2 and time.perf_counter() - began > seconds:
                break
    return times


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile; a single time is all three. Raises `IndexError`
    without times.
    """
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4)
    return low, middle, high


def _ones(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return device arrays of ones with the shapes and dtypes of the arguments, in the same trees."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), args)
