"""The only room that touches jaxlib's MLIR bindings: reading, inlining, numbering, pinning, propagating.

Nothing here knows costs or strategies. Positions of ops are those of `number_ops`; they are equal for the
sharded and the unsharded lowering of one program, which `structure_hash` proves.
"""

from autoshard.mlir._calls import call_counts as call_counts
from autoshard.mlir._calls import call_key as call_key
from autoshard.mlir._calls import call_shapes as call_shapes
from autoshard.mlir._calls import call_target as call_target
from autoshard.mlir._calls import emit_call as emit_call
from autoshard.mlir._calls import has_fixed_shapes as has_fixed_shapes
from autoshard.mlir._calls import is_by_hand as is_by_hand
from autoshard.mlir._calls import remaining_calls as remaining_calls
from autoshard.mlir._calls import rule_attribute as rule_attribute
from autoshard.mlir._calls import run_on_shards as run_on_shards
from autoshard.mlir._calls import splice as splice
from autoshard.mlir._calls import tensor_types as tensor_types
from autoshard.mlir._files import Entry as Entry
from autoshard.mlir._files import argument_names as argument_names
from autoshard.mlir._files import donated as donated
from autoshard.mlir._files import first_line as first_line
from autoshard.mlir._files import hlo_text_to_proto as hlo_text_to_proto
from autoshard.mlir._files import hlo_to_stablehlo as hlo_to_stablehlo
from autoshard.mlir._files import read_file_module as read_file_module
from autoshard.mlir._files import take_entry as take_entry
from autoshard.mlir._files import to_portable as to_portable
from autoshard.mlir._inline import inline_calls as inline_calls
from autoshard.mlir._inline import replace_body as replace_body
from autoshard.mlir._module import location_name as location_name
from autoshard.mlir._module import main_block as main_block
from autoshard.mlir._module import main_function as main_function
from autoshard.mlir._module import main_types as main_types
from autoshard.mlir._module import new_context as new_context
from autoshard.mlir._module import parse_module as parse_module
from autoshard.mlir._module import source_line as source_line
from autoshard.mlir._module import to_bytes as to_bytes
from autoshard.mlir._number import canonical_text as canonical_text
from autoshard.mlir._number import number_ops as number_ops
from autoshard.mlir._number import strip as strip
from autoshard.mlir._number import structure_hash as structure_hash
from autoshard.mlir._own import argument_shardings as argument_shardings
from autoshard.mlir._own import device_groups as device_groups
from autoshard.mlir._own import drop_gspmd as drop_gspmd
from autoshard.mlir._own import mesh_texts as mesh_texts
from autoshard.mlir._own import use_mesh as use_mesh
from autoshard.mlir._pins import PinLike as PinLike
from autoshard.mlir._pins import count_pins as count_pins
from autoshard.mlir._pins import insert_pins as insert_pins
from autoshard.mlir._propagate import explicit_reshards as explicit_reshards
from autoshard.mlir._propagate import run_propagation as run_propagation
from autoshard.mlir._rules import populate_rules as populate_rules
from autoshard.mlir._shardings import SpecLike as SpecLike
from autoshard.mlir._shardings import aliases as aliases
from autoshard.mlir._shardings import ensure_mesh as ensure_mesh
from autoshard.mlir._shardings import read_shardings as read_shardings
from autoshard.mlir._shardings import set_aliases as set_aliases
from autoshard.mlir._shardings import set_shardings as set_shardings
from autoshard.mlir._shardings import sharding_attribute as sharding_attribute
from autoshard.mlir._uses import Use as Use
from autoshard.mlir._uses import argument_uses as argument_uses
from autoshard.mlir._uses import updated_arguments as updated_arguments
