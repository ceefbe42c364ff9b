"""Running a captured graph under its plan: the same computation, pinned, on inputs that are split as planned."""

from collections.abc import Sequence
from typing import Any

from autoshard import mlir
from autoshard.exec.torch_xla_hook._capture import Capture
from autoshard.exec.torch_xla_hook._marks import LiveMesh
from autoshard.exec.torch_xla_hook._xlac import xlac
from autoshard.plan import Plan, Spec


def planned_proto(capture: Capture, plan: Plan, mesh: LiveMesh) -> bytes:
    """The captured module as a serialised HLO module, the plan's pins in it as GSPMD reads them."""
    module = mlir.parse_module(capture.program.module)
    mlir.insert_pins(module, "mesh", plan.mesh, plan.pins)
    mlir.guard_indexing(module)
    mlir.custom_call_pins(module, lambda dims: mesh.write(Spec(tuple(tuple(axes) for axes in dims))))
    return mlir.to_hlo_proto(module)


def replay(proto: bytes, inputs: Sequence[Any]) -> list[Any]:
    """Pending tensors, one for each result, that the computation yields on these inputs."""
    import torch_xla.core.xla_builder as xb

    computation = xb.computation_from_module_proto("autoshard_step", proto)
    return xlac()._xla_user_computation("autoshard::step", list(inputs), computation)
