"""Public module of the PyTorch/XLA hook; its import lets autoshard plan for `xr.use_spmd(auto=True)`.

The import is not needed where autoshard is installed: PyTorch loads the hook (see `autoshard.autoload`).
"""

from autoshard.exec.torch_xla_hook import Session as Session
from autoshard.exec.torch_xla_hook import install as install
from autoshard.exec.torch_xla_hook import load_state as load_state
from autoshard.exec.torch_xla_hook import save_state as save_state
from autoshard.exec.torch_xla_hook import session as session


install()
