"""Sums of weight gradients that the TPU compiler scatters, and those that it computes in full and slices.

    python experiments/fidelity/scatter_tiles.py [--only TEXT ...] [--again] [--table]

One program of independent gradients `[k, n]` is compiled for each topology with no TPU. The gradients are summed over
the batch (`data`) and the sequence (`model`), and split over `data` in one dim.

The table, `experiments/results/scatter_tiles.md`, counts reduce-scatters. Its columns are the split dim, and the
shard's elements of that dim in registers of 128 lanes. `waves` in `autoshard/planning/xla/axis_assignments.py` prices
these results.
"""

import os
import re
import sys

from experiments.lib.harness import Experiment, Rows, grid, page


ROWS = ("v4:2x2x2, 4x4", "v5e:4x4, 4x4", "v5p:4x4x4, 4x16", "v6e:4x4, 4x4", "v5e:8x8, 8x8")
"""Topologies, each with the sizes of `data` and `model`."""
SHARDS = (64, 160, 256, 264, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664)
"""Elements of the split dim on one device; shards below a few tiles in bytes are all-reduced for their latency."""
OTHER = 2048
BATCH, SEQUENCE = 256, 256
CLASSES = ("odd registers", "even registers", "part of a register")


def gradients(topology: str, data: int, model: int) -> dict[tuple[int, int], bool]:
    """Map (split dim, shard's elements) to True if the compiled program scatters that gradient."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices).reshape(data, model), ("data", "model"))
    cases = [(dim, shard) for dim in (0, 1) for shard in SHARDS]
    shapes = [(shard * data, OTHER) if dim == 0 else (OTHER, shard * data) for dim, shard in cases]
    splits = [NamedSharding(mesh, PartitionSpec(*("data" if d == dim else None for d in (0, 1)))) for dim, _ in cases]

    def step(xs: list[jax.Array], ys: list[jax.Array]) -> list[jax.Array]:
        sums = []
        for number, (x, y, split) in enumerate(zip(xs, ys, splits, strict=True)):
            with jax.named_scope(f"case{number}_"):
                sums.append(jax.lax.with_sharding_constraint(jnp.einsum("bsk,bsn->kn", x, y), split))
        return sums

    inputs = [[jax.ShapeDtypeStruct((BATCH, SEQUENCE, s[d]), jnp.bfloat16) for s in shapes] for d in (0, 1)]
    spread = NamedSharding(mesh, PartitionSpec("data", "model", None))
    text = jax.jit(step, in_shardings=spread, out_shardings=splits).lower(*inputs).compile().as_text() or ""
    scattered = {
        int(number)
        for line in text.splitlines()
        if re.search(r" reduce-scatter\(|calls=%all-reduce-scatter", line)
        for number in re.findall(r"case(\d+)_", line)
    }
    return {case: number in scattered for number, case in enumerate(cases)}


def work(name: str) -> dict[str, list[str]]:
    """Compute the cells of one row."""
    import libtpu

    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_LIBRARY_PATH": libtpu.get_library_path(),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
    }
    topology, sizes = name.split(", ")
    data, model = map(int, sizes.split("x"))
    found = gradients(topology, data, model)
    cells = []
    for dim in (0, 1):
        for kind in CLASSES:
            mine = [done for (own, shard), done in found.items() if own == dim and _class(shard) == kind]
            cells.append(f"{sum(mine)} of {len(mine)}")
    return {"cells": cells}


def _class(shard: int) -> str:
    return CLASSES[2] if shard % 128 else CLASSES[0] if shard // 128 % 2 else CLASSES[1]


def table(rows: Rows) -> str:
    heads = [f"{dim}: {kind}" for dim in ("first", "last") for kind in CLASSES]
    return page(
        "# Which sums of gradients are scattered",
        """
`python experiments/fidelity/scatter_tiles.py`: gradients of matmuls, bf16, summed over all devices, split over `data`
in the first or the last dim, compiled by libtpu with no TPU. How many become a reduce-scatter, by the shard
in registers of 128 elements.
""",
        grid(" | ".join(["topology, data x model", *heads]), ([name, *row["cells"]] for name, row in rows.items())),
    )


if __name__ == "__main__":
    sys.exit(Experiment(script=__file__, names=ROWS, work=work, table=table).run())
