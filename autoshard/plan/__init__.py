"""Strategies, the Problem, baselines, and the `Plan` that comes out.

The room is also the function that users call: `autoshard.plan(program, topology=...)`. Importing a submodule
binds it as an attribute of its package, so a function of the same name there would be there or not by the order
of imports; a callable module is always both.
"""

import inspect
import sys
from types import ModuleType

from autoshard.plan._call import plan as _plan
from autoshard.plan._make import PlanResult as PlanResult
from autoshard.plan._make import check_request as check_request
from autoshard.plan._make import make_plan as make_plan
from autoshard.plan._make import plan_by_stage as plan_by_stage
from autoshard.plan._make import priced_with as priced_with
from autoshard.plan._recipes import plan_recipes as plan_recipes
from autoshard.plan._recipes import plan_remat as plan_remat
from autoshard.plan.capacity._estimates import ModelEstimate as ModelEstimate
from autoshard.plan.capacity._estimates import config_decoder as config_decoder
from autoshard.plan.capacity._estimates import estimate_config as estimate_config
from autoshard.plan.capacity._estimates import fewest_devices as fewest_devices
from autoshard.plan.capacity._estimates import least_estimate as least_estimate
from autoshard.plan.capacity._serving import ServingPlan as ServingPlan
from autoshard.plan.capacity._serving import plan_serving as plan_serving
from autoshard.plan.capacity._serving_check import CheckedStep as CheckedStep
from autoshard.plan.capacity._serving_check import check_serving as check_serving
from autoshard.plan.capacity._serving_specs import ServingDims as ServingDims
from autoshard.plan.capacity._serving_specs import ServingSpecs as ServingSpecs
from autoshard.plan.capacity._serving_specs import serving_specs as serving_specs
from autoshard.plan.capacity._sweep import is_sweep as is_sweep
from autoshard.plan.capacity._sweep import read_sweep as read_sweep
from autoshard.plan.capacity._sweep import sweep as sweep
from autoshard.plan.capacity._sweep_row import SweepChoice as SweepChoice
from autoshard.plan.capacity._sweep_row import SweepRow as SweepRow
from autoshard.plan.capacity._sweep_row import choose_rows as choose_rows
from autoshard.plan.capacity._sweep_task import SweepTask as SweepTask
from autoshard.plan.forms._by_name import Mappings as Mappings
from autoshard.plan.forms._forms import FORMS as FORMS
from autoshard.plan.forms._forms import Form as Form
from autoshard.plan.forms._forms import Rest as Rest
from autoshard.plan.forms._forms import check_names as check_names
from autoshard.plan.forms._forms import dims_by_axis as dims_by_axis
from autoshard.plan.forms._forms import form_named as form_named
from autoshard.plan.forms._forms import held_specs as held_specs
from autoshard.plan.forms._forms import in_mesh_order as in_mesh_order
from autoshard.plan.forms._forms import inputs_axis as inputs_axis
from autoshard.plan.forms._forms import layer_spec as layer_spec
from autoshard.plan.forms._forms import maxtext_uses as maxtext_uses
from autoshard.plan.forms._forms import module_pattern as module_pattern
from autoshard.plan.forms._forms import splits_in_plan as splits_in_plan
from autoshard.plan.forms._forms import splits_nothing as splits_nothing
from autoshard.plan.forms._within import by_name as by_name
from autoshard.plan.forms._within import price_form as price_form
from autoshard.plan.mesh._portfolio import PlanCandidate as PlanCandidate
from autoshard.plan.model._asked import Asked as Asked
from autoshard.plan.model._asked import read_asked as read_asked
from autoshard.plan.model._choices import settled_options as settled_options
from autoshard.plan.model._choices import source_choices as source_choices
from autoshard.plan.model._options import Options as Options
from autoshard.plan.model._options import PlanOptions as PlanOptions
from autoshard.plan.model._options import read_options as read_options
from autoshard.plan.price._again import plan_bills as plan_bills
from autoshard.plan.price._reading import as_planned as as_planned
from autoshard.plan.price._reading import batch_dims as batch_dims
from autoshard.plan.published._degrees import DegreeChoice as DegreeChoice
from autoshard.plan.published._degrees import choose_degrees as choose_degrees
from autoshard.plan.published._degrees import gpu_decoder as gpu_decoder
from autoshard.plan.published._degrees import said_degrees as said_degrees
from autoshard.plan.published._gpu_pairs import GpuPairs as GpuPairs
from autoshard.plan.published._gpu_pairs import GpuProblem as GpuProblem
from autoshard.plan.published._gpu_pairs import PricedGpuRow as PricedGpuRow
from autoshard.plan.published._gpu_pairs import geometric_mean as geometric_mean
from autoshard.plan.published._gpu_pairs import validate_gpu_pairs as validate_gpu_pairs
from autoshard.plan.published._gpu_rows import names_gpu_rows as names_gpu_rows
from autoshard.plan.published._pair_rows import MeasuredGroup as MeasuredGroup
from autoshard.plan.published._pair_rows import MeasuredPlan as MeasuredPlan
from autoshard.plan.published._pair_rows import read_groups as read_groups
from autoshard.plan.published._pairs import PairGroup as PairGroup
from autoshard.plan.published._pairs import PairRow as PairRow
from autoshard.plan.published._pairs import PairSummary as PairSummary
from autoshard.plan.published._pairs import summarise_pairs as summarise_pairs
from autoshard.plan.published._pairs import validate_pairs as validate_pairs
from autoshard.plan.published._published import IncompleteError as IncompleteError
from autoshard.plan.published._published import Run as Run
from autoshard.plan.published._published import is_published as is_published
from autoshard.plan.published._rebuild import PublishedRow as PublishedRow
from autoshard.plan.published._rebuild import stated_plan as stated_plan
from autoshard.plan.published._rebuild import validate_published as validate_published
from autoshard.plan.published._waits import INDISTINCT as INDISTINCT
from autoshard.plan.record._digest import plan_digest as plan_digest
from autoshard.plan.record._notation import hlo_sharding as hlo_sharding
from autoshard.plan.record._notation import mesh_split as mesh_split
from autoshard.plan.record._notation import parse_hlo_sharding as parse_hlo_sharding
from autoshard.plan.record._notation import tile_devices as tile_devices
from autoshard.plan.record._parts import WAITS_FOR_HOST as WAITS_FOR_HOST
from autoshard.plan.record._parts import Activation as Activation
from autoshard.plan.record._parts import Call as Call
from autoshard.plan.record._parts import Collective as Collective
from autoshard.plan.record._parts import HeldTensors as HeldTensors
from autoshard.plan.record._parts import MeshTried as MeshTried
from autoshard.plan.record._parts import ParameterUse as ParameterUse
from autoshard.plan.record._parts import Pin as Pin
from autoshard.plan.record._parts import PlannedOp as PlannedOp
from autoshard.plan.record._parts import Prediction as Prediction
from autoshard.plan.record._parts import Region as Region
from autoshard.plan.record._parts import Span as Span
from autoshard.plan.record._parts import Timeline as Timeline
from autoshard.plan.record._parts import Unruled as Unruled
from autoshard.plan.record._pipeline import PlannedChunk as PlannedChunk
from autoshard.plan.record._pipeline import PlannedPipeline as PlannedPipeline
from autoshard.plan.record._plan import SCHEMA as SCHEMA
from autoshard.plan.record._plan import Plan as Plan
from autoshard.plan.record._resharding import StateReshard as StateReshard
from autoshard.plan.record._resharding import predict_reshard as predict_reshard
from autoshard.plan.record._spec import Spec as Spec
from autoshard.plan.record._spec import axis_words as axis_words
from autoshard.plan.record._spec import mesh_words as mesh_words
from autoshard.plan.record._spec import spec_text as spec_text
from autoshard.plan.record._stacks import is_stacked as is_stacked
from autoshard.plan.record._stacks import layer_pattern as layer_pattern
from autoshard.plan.record._stacks import pattern as pattern
from autoshard.plan.record._stacks import stack_names as stack_names
from autoshard.plan.record._store import load_plan as load_plan
from autoshard.plan.record._store import parameter_specs as parameter_specs
from autoshard.plan.record._store import plan_from_json as plan_from_json
from autoshard.plan.record._store import plan_to_json as plan_to_json
from autoshard.plan.record._store import save_plan as save_plan
from autoshard.plan.write._explain import Alternative as Alternative
from autoshard.plan.write._explain import Explanation as Explanation
from autoshard.plan.write._explain import explain_plan as explain_plan
from autoshard.plan.write._explain import explanation_figures as explanation_figures
from autoshard.plan.write._explain import reopen as reopen
from autoshard.plan.write._program_graph import ProgramGraph as ProgramGraph
from autoshard.plan.write._program_graph import program_graph as program_graph
from autoshard.plan.write._recipe import Recipe as Recipe
from autoshard.plan.write._remat_policy import planned_remat as planned_remat
from autoshard.plan.write._remat_policy import remat_policy as remat_policy
from autoshard.plan.write._remat_policy import torch_remat_policy as torch_remat_policy
from autoshard.plan.write._staged import is_by_stage as is_by_stage


class _Room(ModuleType):
    __call__ = staticmethod(_plan)


__signature__ = inspect.signature(_plan)
sys.modules[__name__].__class__ = _Room
