"""Auto-sharding inside PyTorch/XLA; importing this is enough for `xr.use_spmd(auto=True)` to plan with autoshard.

With autoshard installed not even that is needed: PyTorch loads it (see `autoshard.autoload`).
"""

from autoshard.exec.torch_xla_hook import Session as Session
from autoshard.exec.torch_xla_hook import install as install
from autoshard.exec.torch_xla_hook import load_state as load_state
from autoshard.exec.torch_xla_hook import save_state as save_state
from autoshard.exec.torch_xla_hook import session as session


install()
