"""Auto-sharding inside PyTorch/XLA: `xr.use_spmd(auto=True)` plans the first step of an unchanged script.

The first step is left pending as the lazy backend has it, read as one StableHLO module (forward, backward,
optimizer), planned, and run under the plan; parameters, optimizer state and inputs are then held as planned, and the
outputs of the user's modules are pinned in every later step.
"""

from autoshard.exec.torch_xla_hook._enable import install as install
from autoshard.exec.torch_xla_hook._enable import session as session
from autoshard.exec.torch_xla_hook._session import Session as Session
