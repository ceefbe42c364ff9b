"""Degrees of parallelism for decoders under eager frameworks on GPUs."""

from autoshard.degrees.degree_choice import DegreeChoice as DegreeChoice
from autoshard.degrees.degree_choice import choose_degrees as choose_degrees
from autoshard.degrees.degree_choice import format_degrees as format_degrees
from autoshard.degrees.degree_choice import gpu_decoder as gpu_decoder
from autoshard.degrees.degree_tables import DEGREE_FORMS as DEGREE_FORMS
from autoshard.degrees.degree_tables import degree_figures as degree_figures
from autoshard.degrees.degree_tables import degree_report as degree_report
from autoshard.degrees.eager_step import eager_step_s as eager_step_s
from autoshard.degrees.gpu_run import GpuRun as GpuRun
from autoshard.degrees.gpu_run import gpu_stages as gpu_stages
from autoshard.degrees.gpu_step import price_forward as price_forward
from autoshard.degrees.gpu_step import price_step as price_step
from autoshard.degrees.gpu_step import resident_bytes as resident_bytes
from autoshard.degrees.node_waits import INDISTINCT as INDISTINCT
