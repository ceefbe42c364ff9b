"""What things cost on real machines: chips, topologies, meshes, collectives, compute and their calibration."""

from autoshard.cost._calibration import Calibration as Calibration
from autoshard.cost._calibration import figure_names as figure_names
from autoshard.cost._calibration import load_calibration as load_calibration
from autoshard.cost._calibration import save_calibration as save_calibration
from autoshard.cost._chip import Chip as Chip
from autoshard.cost._chip import chip_names as chip_names
from autoshard.cost._chip import dtype_class as dtype_class
from autoshard.cost._chip import load_chip as load_chip
from autoshard.cost._chip import load_chip_file as load_chip_file
from autoshard.cost._collectives import KINDS as KINDS
from autoshard.cost._collectives import Collectives as Collectives
from autoshard.cost._collectives import Kind as Kind
from autoshard.cost._collectives import links as links
from autoshard.cost._compute import Compute as Compute
from autoshard.cost._layout import Segment as Segment
from autoshard.cost._mesh import Mesh as Mesh
from autoshard.cost._mesh import default_axis_names as default_axis_names
from autoshard.cost._mesh import make_mesh as make_mesh
from autoshard.cost._mesh import parse_mesh as parse_mesh
from autoshard.cost._topology import PhysicalAxis as PhysicalAxis
from autoshard.cost._topology import Topology as Topology
from autoshard.cost._topology import slice_names as slice_names
