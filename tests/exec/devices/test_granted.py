"""Memory of GPUs that JAX allocates only if it is configured to."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import UserError
from autoshard.exec.devices.local_devices import check_granted
from autoshard.exec.run.planned_steps import failure
from autoshard.planning import Plan


GIB = 1 << 30


def planned(gib: float, topology: str = "h100:1") -> Plan:
    """Plan a step whose argument and result together need so many GiB."""
    rows = int(gib * GIB / 2 / 4096)
    args = (jax.ShapeDtypeStruct((rows, 1024), jnp.float32),)
    return autoshard.plan(autoshard.trace(lambda x: 2.0 * x, args), topology=topology, mesh={"data": 1})


def compiled(gib: float) -> SimpleNamespace:
    """Return a stand-in for the memory statistics of `jax.stages.Compiled`."""
    sizes = {"argument": 2, "output": 1, "temp": 1, "alias": 1}
    stats = {f"{name}_size_in_bytes": parts * gib * GIB / 3 for name, parts in sizes.items()}
    return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**stats))


def refuse() -> None:
    raise RuntimeError("MemoryStats is only supported for addressable PjRt devices.")


def devices(gib: float | None) -> list[SimpleNamespace]:
    """Return one device of another process, and one of this process."""
    stats = None if gib is None else {"bytes_limit": int(gib * GIB)}
    theirs = SimpleNamespace(process_index=1, memory_stats=refuse)
    return [theirs, SimpleNamespace(process_index=0, memory_stats=lambda: stats)]


def test_a_plan_above_what_jax_takes_says_which_share_it_needs():
    plan = planned(70.0)
    (line,) = (line for line in plan.warnings if "XLA_PYTHON_CLIENT_MEM_FRACTION" in line)
    assert line.endswith(
        "of which JAX allocates 75% by default: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.88 before Python starts."
    )
    assert plan.provenance["memory_fraction"] == 0.88
    assert "memory_fraction" not in planned(50.0).provenance
    assert "memory_fraction" not in planned(14.0, "v5e:1x1").provenance


def test_a_step_that_needs_more_than_was_granted_is_refused_before_it_runs():
    plan = planned(70.0)
    check_granted(plan, compiled(59.0), devices(60.0))
    check_granted(plan, compiled(70.0), devices(None))
    with pytest.raises(
        UserError, match=r"takes 70.00 GiB .*granted 60.00 GiB .*MEM_FRACTION=0.88 before Python starts"
    ):
        check_granted(plan, compiled(70.0), devices(60.0))
    with pytest.raises(UserError, match=r"granted 78.00 GiB of it: plan with a --memory-limit that fits, or for more"):
        check_granted(plan, compiled(90.0), devices(78.0))


def test_a_step_that_ran_out_of_memory_names_the_variable():
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    assert "(JAX takes 75% of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION=0.88 says more)" in str(
        failure(planned(70.0), error)
    )
    small = dataclasses.replace(planned(10.0))
    assert "FRACTION" not in str(failure(small, error))
