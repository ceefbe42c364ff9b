"""Applying plans, running, compiling ahead of time, measuring."""

from autoshard.base.providers import provides
from autoshard.exec.ahead._compile import CompileReport as CompileReport
from autoshard.exec.ahead._compile import Unforeseen as Unforeseen
from autoshard.exec.ahead._compile import Verdict as Verdict
from autoshard.exec.ahead._compile import compile_figures as compile_figures
from autoshard.exec.ahead._compile import compile_lines as compile_lines
from autoshard.exec.ahead._compile import compile_plan as compile_plan
from autoshard.exec.ahead._compile import compile_plans as compile_plans
from autoshard.exec.ahead._compile_pairs import compile_pairs as compile_pairs
from autoshard.exec.apply._apply import Application as Application
from autoshard.exec.apply._apply import PlannedFunction as PlannedFunction
from autoshard.exec.apply._export import jax_export as jax_export
from autoshard.exec.apply._keras_fit import fit_as_planned as fit_as_planned
from autoshard.exec.apply._placements import placements_of as placements_of
from autoshard.exec.apply._placements import spec_of_placements as spec_of_placements
from autoshard.exec.apply._torch_plan import TorchPlan as TorchPlan
from autoshard.exec.apply._torch_plan import distribution_notes as distribution_notes
from autoshard.exec.devices._devices import ensure_devices as ensure_devices
from autoshard.exec.devices._devices import jax_mesh as jax_mesh
from autoshard.exec.devices._devices import plan_devices as plan_devices
from autoshard.exec.hlo._collectives import CompiledCollective as CompiledCollective
from autoshard.exec.hlo._collectives import count_by_kind as count_by_kind
from autoshard.exec.hlo._collectives import plan_mesh as plan_mesh
from autoshard.exec.hlo._collectives import read_collectives as read_collectives
from autoshard.exec.hlo._collectives import wire_by_axis as wire_by_axis
from autoshard.exec.hlo._estimate import Estimate as Estimate
from autoshard.exec.hlo._estimate import decided as decided
from autoshard.exec.hlo._estimate import estimate as estimate
from autoshard.exec.hlo._estimate import pair_error as pair_error
from autoshard.exec.learn._judge import Seen as Seen
from autoshard.exec.learn._refine import Judged as Judged
from autoshard.exec.learn._refine import Refinement as Refinement
from autoshard.exec.learn._refine import refine as refine
from autoshard.exec.learn._refine import refinement_figures as refinement_figures
from autoshard.exec.run._check import Check as Check
from autoshard.exec.run._check import Difference as Difference
from autoshard.exec.run._measure import Measurement as Measurement
from autoshard.exec.run._measure import measure as measure
from autoshard.exec.run._measure import measurement_figures as measurement_figures
from autoshard.exec.run._program_check import check as check
from autoshard.exec.run._trace import CollectiveTime as CollectiveTime
from autoshard.exec.run._trace import CollectiveTimes as CollectiveTimes


provides("run")(Application)
