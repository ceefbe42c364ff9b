"""Notes about remat policies of JAX that name values for the host of which none goes there."""

from typing import Any

from autoshard.program._jaxpr_digest import equations
from autoshard.program._on_host import is_hosted


def offload_notes(jaxpr: Any) -> tuple[str, ...]:
    """Return a note that names values that a policy offloads and that the backward pass does not read.

    JAX keeps nothing for a name that the backward pass does not use. The carry of a scan is such a value where it is
    named at the end of the layer: the scan saves what the next layer begins with, under no name.
    """
    every = list(equations(jaxpr))
    policies = {e.params["policy"] for e in every if e.params.get("differentiated") and e.params.get("policy")}
    if not policies:
        return ()
    named = [e for e in every if e.primitive.name == "name"]
    offloaded = [e for e in named if any(_is_offloaded(policy, e) for policy in policies)]
    hosted = {var for e in every if all(map(is_hosted, _avals(e))) for var in e.invars if not hasattr(var, "val")}
    sent = {e.params["name"] for e in offloaded if not hosted.isdisjoint(e.outvars)}
    idle = sorted({e.params["name"] for e in offloaded} - sent)
    if not idle:
        return ()
    quoted = ", ".join(f"`{name}`" for name in idle)
    return (
        f"A remat policy offloads {quoted}, which has no effect: the backward pass does not read a value of that name. "
        "To offload the carry of a jax.lax.scan, name it where the layer begins instead of where it ends.",
    )


def _is_offloaded(policy: Any, equation: Any) -> bool:
    """Ask the policy about the equation of `checkpoint_name`, as JAX does."""
    answer = policy(equation.primitive, *(var.aval for var in equation.invars), **equation.params)
    return type(answer).__name__ == "Offloadable"


def _avals(equation: Any) -> list[Any]:
    return [var.aval for var in equation.outvars] if equation.primitive.name == "device_put" else [None]
