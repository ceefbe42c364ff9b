"""Planner of how every tensor of a step is sharded over many accelerators, before any accelerator is rented.

Public names are loaded at their first use, so that `import autoshard` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from autoshard.errors import InfeasibleError as InfeasibleError
from autoshard.errors import UserError as UserError


if TYPE_CHECKING:
    from autoshard.base.ray_pool import RayPool as RayPool
    from autoshard.cost import Topology as Topology
    from autoshard.exec import check as check
    from autoshard.exec import compile_plan
    from autoshard.exec import measure as measure
    from autoshard.exec import refine as refine
    from autoshard.exec.torch_xla_hook import plan_first_step
    from autoshard.exports import export_plan
    from autoshard.planning import Plan as Plan
    from autoshard.planning import Spec as Spec
    from autoshard.planning import load_plan
    from autoshard.planning import predict_reshard as predict_reshard
    from autoshard.planning import remat_policy as remat_policy
    from autoshard.planning import sweep as sweep
    from autoshard.planning import torch_remat_policy as torch_remat_policy
    from autoshard.planning.planning_call import plan as plan
    from autoshard.program import Argument as Argument
    from autoshard.program import Program as Program
    from autoshard.program import Role as Role
    from autoshard.program import choices as choices
    from autoshard.program import chunked_cross_entropy as chunked_cross_entropy
    from autoshard.program import from_keras as from_keras
    from autoshard.program import from_torch as from_torch
    from autoshard.program import open_source
    from autoshard.program import register_rule as register_rule
    from autoshard.program import sample_tokens as sample_tokens
    from autoshard.program import segment as segment
    from autoshard.program import stack as stack
    from autoshard.program import trace as trace

    auto_policy = plan_first_step
    compile = compile_plan
    export = export_plan
    load = load_plan
    load_program = open_source

__version__ = "0.1.0"

_HOMES = {
    "Argument": ("autoshard.program", "Argument"),
    "Plan": ("autoshard.planning", "Plan"),
    "Program": ("autoshard.program", "Program"),
    "plan": ("autoshard.planning.planning_call", "plan"),
    "RayPool": ("autoshard.base.ray_pool", "RayPool"),
    "Role": ("autoshard.program", "Role"),
    "Spec": ("autoshard.planning", "Spec"),
    "check": ("autoshard.exec", "check"),
    "choices": ("autoshard.program", "choices"),
    "chunked_cross_entropy": ("autoshard.program", "chunked_cross_entropy"),
    "auto_policy": ("autoshard.exec.torch_xla_hook", "plan_first_step"),
    "load": ("autoshard.planning", "load_plan"),
    "compile": ("autoshard.exec", "compile_plan"),
    "export": ("autoshard.exports", "export_plan"),
    "from_keras": ("autoshard.program", "from_keras"),
    "from_torch": ("autoshard.program", "from_torch"),
    "load_program": ("autoshard.program", "open_source"),
    "measure": ("autoshard.exec", "measure"),
    "Topology": ("autoshard.cost", "Topology"),
    "predict_reshard": ("autoshard.planning", "predict_reshard"),
    "refine": ("autoshard.exec", "refine"),
    "remat_policy": ("autoshard.planning", "remat_policy"),
    "sweep": ("autoshard.planning", "sweep"),
    "register_rule": ("autoshard.program", "register_rule"),
    "sample_tokens": ("autoshard.program", "sample_tokens"),
    "segment": ("autoshard.program", "segment"),
    "stack": ("autoshard.program", "stack"),
    "torch_remat_policy": ("autoshard.planning", "torch_remat_policy"),
    "trace": ("autoshard.program", "trace"),
}
"""Public name -> the module that defines it, and its name there."""

_ROOMS = (
    "cost",
    "degrees",
    "exec",
    "exports",
    "graph",
    "planning",
    "program",
    "report",
    "serving",
    "solver",
    "validation",
)
"""Packages of autoshard that are imported at their first use, such as `autoshard.cost`."""


def __getattr__(name: str) -> Any:
    """Import and return the public name or the room `name`, and cache it; raise `AttributeError` for any other name."""
    if name in _HOMES:
        module, attribute = _HOMES[name]
        value = getattr(importlib.import_module(module), attribute)
    elif name in _ROOMS:
        value = importlib.import_module(f"autoshard.{name}")
    else:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all names of the package, sorted, also of those that are not imported yet."""
    return sorted({*globals(), *_HOMES, *_ROOMS})
