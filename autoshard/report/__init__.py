"""Presentation of a plan and of measurements: terminal reports, pages, pictures and traces."""

from autoshard.base.providers import provides
from autoshard.planning import hlo_sharding as hlo_sharding
from autoshard.report.display import Printable as Printable
from autoshard.report.display import ProgressLine as ProgressLine
from autoshard.report.display import write_text as write_text
from autoshard.report.drawing.graph_files import graph_figures as graph_figures
from autoshard.report.drawing.graph_files import graph_form as graph_form
from autoshard.report.drawing.graph_files import graph_report as graph_report
from autoshard.report.drawing.graph_files import write_graph as write_graph
from autoshard.report.drawing.graph_svg import graph_svg as graph_svg
from autoshard.report.figures import best_baseline as best_baseline
from autoshard.report.figures import plan_figures as plan_figures
from autoshard.report.page.html_report import html_report as html_report
from autoshard.report.page.notebook import NotebookView as NotebookView
from autoshard.report.page.perfetto import perfetto_json as perfetto_json
from autoshard.report.page.perfetto import perfetto_trace as perfetto_trace
from autoshard.report.page.perfetto import read_profile as read_profile
from autoshard.report.page.sweep_report import plot_sweep as plot_sweep
from autoshard.report.page.sweep_report import sweep_figures as sweep_figures
from autoshard.report.page.sweep_report import sweep_page as sweep_page
from autoshard.report.page.sweep_report import sweep_report as sweep_report
from autoshard.report.terminal.comparison import ComparisonRow as ComparisonRow
from autoshard.report.terminal.comparison import candidate_figures as candidate_figures
from autoshard.report.terminal.comparison import candidates as candidates
from autoshard.report.terminal.comparison import candidates_report as candidates_report
from autoshard.report.terminal.comparison import comparison_figures as comparison_figures
from autoshard.report.terminal.comparison import comparison_report as comparison_report
from autoshard.report.terminal.doctor_report import doctor as doctor
from autoshard.report.terminal.doctor_report import doctor_report as doctor_report
from autoshard.report.terminal.explanation_report import explanation_report as explanation_report
from autoshard.report.terminal.measurement_report import measurement_report as measurement_report
from autoshard.report.terminal.measurement_report import refinement_report as refinement_report
from autoshard.report.terminal.plan_difference import PlanChange as PlanChange
from autoshard.report.terminal.plan_difference import difference as difference
from autoshard.report.terminal.plan_difference import difference_figures as difference_figures
from autoshard.report.terminal.plan_difference import difference_report as difference_report
from autoshard.report.terminal.sharding_pictures import visualize_sharding as visualize_sharding
from autoshard.report.terminal.sharding_pictures import visualize_spec as visualize_spec
from autoshard.report.terminal.sharding_pictures import visualize_tensor_sharding as visualize_tensor_sharding
from autoshard.report.terminal.terminal_report import terminal_report as terminal_report


provides("view")(NotebookView)
