"""Strategies, the Problem, baselines, and the `Plan` that comes out.

The room is also the function that users call: `autoshard.plan(program, topology=...)`. Importing a submodule
binds it as an attribute of its package, so a function of the same name there would be there or not by the order
of imports; a callable module is always both.
"""

import inspect
import sys
from types import ModuleType

from autoshard.plan._again import plan_bills as plan_bills
from autoshard.plan._asked import Asked as Asked
from autoshard.plan._asked import read_asked as read_asked
from autoshard.plan._call import plan as _plan
from autoshard.plan._digest import plan_digest as plan_digest
from autoshard.plan._explain import Alternative as Alternative
from autoshard.plan._explain import Explanation as Explanation
from autoshard.plan._explain import explain_plan as explain_plan
from autoshard.plan._explain import explanation_figures as explanation_figures
from autoshard.plan._explain import reopen as reopen
from autoshard.plan._forms import FORMS as FORMS
from autoshard.plan._forms import Form as Form
from autoshard.plan._forms import Rest as Rest
from autoshard.plan._forms import form_named as form_named
from autoshard.plan._forms import held_specs as held_specs
from autoshard.plan._forms import in_mesh_order as in_mesh_order
from autoshard.plan._forms import maxtext_uses as maxtext_uses
from autoshard.plan._forms import splits_in_plan as splits_in_plan
from autoshard.plan._forms import splits_nothing as splits_nothing
from autoshard.plan._make import PlanResult as PlanResult
from autoshard.plan._make import check_request as check_request
from autoshard.plan._make import make_plan as make_plan
from autoshard.plan._notation import hlo_sharding as hlo_sharding
from autoshard.plan._notation import mesh_split as mesh_split
from autoshard.plan._notation import parse_hlo_sharding as parse_hlo_sharding
from autoshard.plan._notation import tile_devices as tile_devices
from autoshard.plan._plan import SCHEMA as SCHEMA
from autoshard.plan._plan import Call as Call
from autoshard.plan._plan import Collective as Collective
from autoshard.plan._plan import MeshTried as MeshTried
from autoshard.plan._plan import Pin as Pin
from autoshard.plan._plan import Plan as Plan
from autoshard.plan._plan import Prediction as Prediction
from autoshard.plan._plan import Region as Region
from autoshard.plan._plan import Span as Span
from autoshard.plan._plan import Timeline as Timeline
from autoshard.plan._plan import Unruled as Unruled
from autoshard.plan._portfolio import PlanCandidate as PlanCandidate
from autoshard.plan._program_graph import ProgramGraph as ProgramGraph
from autoshard.plan._program_graph import program_graph as program_graph
from autoshard.plan._published import is_published as is_published
from autoshard.plan._reading import as_planned as as_planned
from autoshard.plan._reading import batch_dims as batch_dims
from autoshard.plan._rebuild import PublishedRow as PublishedRow
from autoshard.plan._rebuild import validate_published as validate_published
from autoshard.plan._spec import Spec as Spec
from autoshard.plan._spec import axis_words as axis_words
from autoshard.plan._spec import mesh_words as mesh_words
from autoshard.plan._spec import spec_text as spec_text
from autoshard.plan._stacks import is_stacked as is_stacked
from autoshard.plan._stacks import layer_pattern as layer_pattern
from autoshard.plan._store import load_plan as load_plan
from autoshard.plan._store import parameter_specs as parameter_specs
from autoshard.plan._store import save_plan as save_plan
from autoshard.plan._sweep import SweepRow as SweepRow
from autoshard.plan._sweep import SweepTask as SweepTask
from autoshard.plan._sweep import sweep as sweep
from autoshard.plan._variants import plan_variants as plan_variants
from autoshard.plan._within import price_form as price_form
from autoshard.program._program import set_graph_maker


set_graph_maker(program_graph)


class _Room(ModuleType):
    __call__ = staticmethod(_plan)


__signature__ = inspect.signature(_plan)
sys.modules[__name__].__class__ = _Room
