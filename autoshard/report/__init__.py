"""Turning a plan and measurements into something to look at."""

from autoshard.base.providers import provides
from autoshard.plan import hlo_sharding as hlo_sharding
from autoshard.report._candidates import candidate_figures as candidate_figures
from autoshard.report._candidates import candidates_report as candidates_report
from autoshard.report._compare import ComparisonRow as ComparisonRow
from autoshard.report._compare import candidates as candidates
from autoshard.report._compare import comparison_figures as comparison_figures
from autoshard.report._compare import comparison_report as comparison_report
from autoshard.report._degrees import DEGREE_FORMS as DEGREE_FORMS
from autoshard.report._degrees import degree_figures as degree_figures
from autoshard.report._degrees import degree_report as degree_report
from autoshard.report._diff import PlanChange as PlanChange
from autoshard.report._diff import difference as difference
from autoshard.report._diff import difference_figures as difference_figures
from autoshard.report._diff import difference_report as difference_report
from autoshard.report._doctor import doctor as doctor
from autoshard.report._doctor import doctor_report as doctor_report
from autoshard.report._explain import explanation_report as explanation_report
from autoshard.report._export import EXPORT_FORMS as EXPORT_FORMS
from autoshard.report._export import Export as Export
from autoshard.report._export import export_plan as export_plan
from autoshard.report._export import make_export as make_export
from autoshard.report._export_torch import placements as placements
from autoshard.report._figures import best_baseline as best_baseline
from autoshard.report._figures import plan_figures as plan_figures
from autoshard.report._gpu_pairs import gpu_pair_figures as gpu_pair_figures
from autoshard.report._gpu_pairs import gpu_pair_report as gpu_pair_report
from autoshard.report._graph_figures import graph_figures as graph_figures
from autoshard.report._graph_figures import graph_report as graph_report
from autoshard.report._graph_files import graph_form as graph_form
from autoshard.report._graph_files import write_graph as write_graph
from autoshard.report._graph_svg import graph_svg as graph_svg
from autoshard.report._html import html_report as html_report
from autoshard.report._measurement import measurement_report as measurement_report
from autoshard.report._names import Printable as Printable
from autoshard.report._notebook import NotebookView as NotebookView
from autoshard.report._pairs import pair_figures as pair_figures
from autoshard.report._pairs import pair_report as pair_report
from autoshard.report._pairs import plot_pairs as plot_pairs
from autoshard.report._pairs import write_pair_page as write_pair_page
from autoshard.report._perfetto import perfetto_json as perfetto_json
from autoshard.report._perfetto import perfetto_trace as perfetto_trace
from autoshard.report._perfetto import read_profile as read_profile
from autoshard.report._picture import visualize_sharding as visualize_sharding
from autoshard.report._picture import visualize_spec as visualize_spec
from autoshard.report._picture import visualize_tensor_sharding as visualize_tensor_sharding
from autoshard.report._progress import ProgressLine as ProgressLine
from autoshard.report._refinement import refinement_report as refinement_report
from autoshard.report._sweep import plot_sweep as plot_sweep
from autoshard.report._sweep import sweep_figures as sweep_figures
from autoshard.report._sweep import sweep_report as sweep_report
from autoshard.report._terminal import terminal_report as terminal_report
from autoshard.report._validation import Validation as Validation
from autoshard.report._validation import passes as passes
from autoshard.report._validation import validate as validate
from autoshard.report._validation import validation_figures as validation_figures
from autoshard.report._validation import validation_report as validation_report
from autoshard.report._write import write_text as write_text


provides("view")(NotebookView)
