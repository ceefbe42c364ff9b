"""What a plan's recipe says of a function of the user's own."""

from collections.abc import Callable
from typing import Any

from autoshard.plan import Plan
from autoshard.program import as_asked, pipelined, read_pipeline


def in_recipe(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its stacks of layers as the plan has them: in stages, if it was planned so."""
    source = plan.provenance.get("source") or {}
    said = source.get("options", {})
    pipeline = read_pipeline(said.get("stages"), said.get("microbatches"), said.get("schedule"))
    if pipeline is None:
        return fn
    with pipelined(pipeline):
        return as_asked(fn)
