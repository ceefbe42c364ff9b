"""Memory that JAX takes of a GPU: a share that is set before it starts."""

import math

from autoshard.cost._topology import Topology


JAX_SHARE = 0.75
"""Share of a GPU's memory that JAX takes unless `FRACTION` says another (jax.dev, "GPU memory allocation")."""
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def fraction_for(topology: Topology, peak_bytes: float) -> float | None:
    """Return the share of a GPU's memory, in hundredths, that a step of such a peak must be given.

    None where JAX takes enough by itself, and for devices whose memory it takes whole.
    """
    if topology.traits.name != "gpu":
        return None
    share = peak_bytes / (topology.chip.hbm_bytes / topology.chip.devices_per_chip)
    return math.ceil(100 * share) / 100 if share > JAX_SHARE else None
