"""Application, execution, ahead-of-time compilation, measurement and refinement of plans."""

from autoshard.base.providers import provides
from autoshard.exec.ahead.ahead_process import compiler_target as compiler_target
from autoshard.exec.ahead.compile_plans import CompileReport as CompileReport
from autoshard.exec.ahead.compile_plans import Unforeseen as Unforeseen
from autoshard.exec.ahead.compile_plans import Verdict as Verdict
from autoshard.exec.ahead.compile_plans import compile_figures as compile_figures
from autoshard.exec.ahead.compile_plans import compile_lines as compile_lines
from autoshard.exec.ahead.compile_plans import compile_plan as compile_plan
from autoshard.exec.ahead.compile_plans import compile_plans as compile_plans
from autoshard.exec.ahead.compiled_plan import compiled_plan as compiled_plan
from autoshard.exec.apply.exported_step import jax_export as jax_export
from autoshard.exec.apply.jax_application import Application as Application
from autoshard.exec.apply.jax_application import PlannedFunction as PlannedFunction
from autoshard.exec.apply.keras_training import fit_as_planned as fit_as_planned
from autoshard.exec.devices.local_devices import ensure_devices as ensure_devices
from autoshard.exec.devices.local_devices import jax_mesh as jax_mesh
from autoshard.exec.devices.local_devices import plan_devices as plan_devices
from autoshard.exec.dtensor.dtensor_placements import placements_of as placements_of
from autoshard.exec.dtensor.dtensor_placements import spec_of_placements as spec_of_placements
from autoshard.exec.dtensor.torch_application import TorchPlan as TorchPlan
from autoshard.exec.dtensor.torch_application import distribution_notes as distribution_notes
from autoshard.exec.hlo.compiled_collectives import CompiledCollective as CompiledCollective
from autoshard.exec.hlo.compiled_collectives import count_by_kind as count_by_kind
from autoshard.exec.hlo.compiled_collectives import plan_mesh as plan_mesh
from autoshard.exec.hlo.compiled_collectives import read_collectives as read_collectives
from autoshard.exec.hlo.compiled_collectives import wire_by_axis as wire_by_axis
from autoshard.exec.hlo.schedule_estimate import Estimate as Estimate
from autoshard.exec.hlo.schedule_estimate import decided as decided
from autoshard.exec.hlo.schedule_estimate import estimate as estimate
from autoshard.exec.hlo.schedule_estimate import pair_error as pair_error
from autoshard.exec.learn.judges import Seen as Seen
from autoshard.exec.learn.refinement import Judged as Judged
from autoshard.exec.learn.refinement import Refinement as Refinement
from autoshard.exec.learn.refinement import refine as refine
from autoshard.exec.learn.refinement import refinement_figures as refinement_figures
from autoshard.exec.run.measurement import Measurement as Measurement
from autoshard.exec.run.measurement import measure as measure
from autoshard.exec.run.measurement import measurement_figures as measurement_figures
from autoshard.exec.run.measurement import verify_program as verify_program
from autoshard.exec.run.profiled_collectives import CollectiveTime as CollectiveTime
from autoshard.exec.run.profiled_collectives import CollectiveTimes as CollectiveTimes
from autoshard.exec.run.program_check import check as check
from autoshard.exec.run.result_check import GROSS as GROSS
from autoshard.exec.run.result_check import Check as Check
from autoshard.exec.run.result_check import Difference as Difference


provides("run")(Application)
