"""Auto-sharding inside PyTorch/XLA: `xr.use_spmd(auto=True)` plans the first step of an unchanged script.

The hook leaves the first step pending in the lazy backend and reads the step as one StableHLO module (forward,
backward, optimizer). It plans the module and runs the step under the plan. Afterwards parameters, optimizer state and
inputs stay sharded as planned. Every later step pins the outputs of the user's modules.
"""

from autoshard.exec.torch_xla_hook.lifecycle.auto_policy import plan_first_step as plan_first_step
from autoshard.exec.torch_xla_hook.lifecycle.enable import install as install
from autoshard.exec.torch_xla_hook.lifecycle.enable import session as session
from autoshard.exec.torch_xla_hook.lifecycle.hook_session import Session as Session
from autoshard.exec.torch_xla_hook.lifecycle.offline_marks import move_marked as move_marked
from autoshard.exec.torch_xla_hook.lifecycle.state_checkpoint import load_state as load_state
from autoshard.exec.torch_xla_hook.lifecycle.state_checkpoint import save_state as save_state
from autoshard.exec.torch_xla_hook.pins.input_placement import inputs_by_shape as inputs_by_shape
from autoshard.exec.torch_xla_hook.planning.runtime_topology import xla_devices as xla_devices
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh as LiveMesh
from autoshard.exec.torch_xla_hook.values.live_marks import is_split as is_split
from autoshard.exec.torch_xla_hook.values.live_marks import partition as partition
from autoshard.exec.torch_xla_hook.values.live_marks import sharding_text as sharding_text
