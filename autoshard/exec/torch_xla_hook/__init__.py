"""Auto-sharding inside PyTorch/XLA: `xr.use_spmd(auto=True)` plans the first step of an unchanged script.

The first step is left pending as the lazy backend has it, read as one StableHLO module (forward, backward,
optimizer), planned, and run under the plan; parameters, optimizer state and inputs are then held as planned, and the
outputs of the user's modules are pinned in every later step.
"""

from autoshard.exec.torch_xla_hook._checkpoint import load_state as load_state
from autoshard.exec.torch_xla_hook._checkpoint import save_state as save_state
from autoshard.exec.torch_xla_hook._enable import install as install
from autoshard.exec.torch_xla_hook._enable import session as session
from autoshard.exec.torch_xla_hook._here import xla_devices as xla_devices
from autoshard.exec.torch_xla_hook._inputs import inputs_by_shape as inputs_by_shape
from autoshard.exec.torch_xla_hook._marks import LiveMesh as LiveMesh
from autoshard.exec.torch_xla_hook._marks import held_spec as held_spec
from autoshard.exec.torch_xla_hook._marks import is_split as is_split
from autoshard.exec.torch_xla_hook._marks import partition as partition
from autoshard.exec.torch_xla_hook._offline import move_marked as move_marked
from autoshard.exec.torch_xla_hook._policy import plan_first_step as plan_first_step
from autoshard.exec.torch_xla_hook._session import Session as Session
