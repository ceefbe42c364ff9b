"""Collectives that compiler flags let compute hide, by generation: the basis of `autoshard/cost/compiler_flags.py`.

    python experiments/fidelity/overlap_by_compiler_flags.py [TOPOLOGY ...]

An MLP of 4 scanned layers of 4096 x 16384 is compiled for each topology with no TPU, by default and with its flags.
FSDP spans all devices with 16384 rows on each device, so that compute lasts longer than all communication. The schedule
is walked (`autoshard.exec.estimate`).

The table is `experiments/results/overlap_by_compiler_flags.md`. It lists gathers and sums; sums include gathers that
the compiler turns into all-reduces. For each it has the milliseconds on the links and the share that compute hides.
Compiled programs are stored under `build/flags`.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.program import Program

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.fidelity.overlap import CLASSES, hidden  # noqa: E402
from experiments.lib.saved_results import BUILD, Results, checked_out  # noqa: E402


TABLE = Path(__file__).parents[1] / "results" / "overlap_by_compiler_flags.md"
LAYERS, WIDTH, INNER, ROWS = 4, 4096, 16384, 16384


def sparse_cores(*kinds: str) -> str:
    return " ".join(f"--xla_tpu_enable_sparse_core_collective_offload_{kind}=true" for kind in kinds)


SPARSE = sparse_cores("all_gather", "all_reduce", "reduce_scatter")
KEPT = "--xla_tpu_prefer_async_allgather_to_allreduce=true"
CASES = (
    ("tpu7x:4x4x4", ""),
    ("v5p:2x2x2", ""),
    ("v5p:2x2x2", SPARSE),
    ("v6e:4x4", ""),
    ("v6e:4x4", SPARSE),
    ("v5p:4x4x4", SPARSE),
    ("v5p:4x4x4", f"{SPARSE} {KEPT}"),
)
"""Topologies, each with compiler flags."""


def mlp(devices: int) -> "Program":
    """Return one step of gradient descent on the MLP: bf16 compute on f32 parameters."""
    import jax
    import jax.numpy as jnp

    from autoshard.program import trace

    def loss(params: Any, x: Any) -> Any:
        def layer(h: Any, weights: Any) -> Any:
            up, down = (w.astype(jnp.bfloat16) for w in weights)
            return h + jax.nn.gelu(h @ up) @ down, None

        h, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        return jnp.sum(h.astype(jnp.float32) ** 2)

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, jax.grad(loss)(params, x))

    shape = jax.ShapeDtypeStruct
    params = (
        shape((LAYERS, WIDTH, INNER), jnp.float32),
        shape((LAYERS, INNER, WIDTH), jnp.float32),
    )
    rows = shape((devices * ROWS, WIDTH), jnp.bfloat16)
    return trace(step, (params, rows), name="mlp", donate_argnums=(0,))


def judged(topology: str, flags: str, time_limit: float) -> str:
    """Return the cells of the table's row.

    Raises `UserError` if the program cannot be compiled.
    """
    from autoshard.cost import Topology, make_mesh
    from autoshard.exec import estimate
    from autoshard.exec.ahead.ahead_process import compile_without_devices
    from autoshard.exec.hlo.hlo_text import parse_hlo
    from autoshard.planning import Options, make_plan, read_asked

    count = Topology.parse(topology).num_devices
    program = mlp(count)
    asked = read_asked({"params.0": "-,data,-", "params.1": "-,-,data"}, None, None, None, None)
    mesh = {"data": count}
    made = make_plan(program, Options(topology=topology, mesh=mesh, xla_flags=flags, calibration=False, asked=asked))
    text = compile_without_devices(program, made.plan, time_limit).text
    schedule = estimate(parse_hlo(text), make_mesh(Topology.parse(topology), made.plan.mesh))
    compute = 1e3 * schedule.compute_s
    return " | ".join([f"{compute:.1f}", *(hidden(schedule, kinds, far=False) for kinds in CLASSES.values())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", help="default: all of the table")
    parser.add_argument("--time-limit", type=float, default=1200.0, help="of one compilation, in seconds")
    arguments = parser.parse_args()
    kept = Results(BUILD / "flags" / "rows.json")
    for topology, flags in CASES:
        if arguments.topologies and topology not in arguments.topologies:
            continue
        key = f"{topology} {flags}".strip()
        if key not in kept.rows:
            print(key, file=sys.stderr, flush=True)
            kept.keep(key, {"cells": judged(topology, flags, arguments.time_limit), "commit": checked_out()})
    lines = [
        "# What compiler flags let compute hide",
        "",
        "`python experiments/fidelity/overlap_by_compiler_flags.py`; libtpu, no TPU. An MLP of 4 layers with FSDP",
        "over all devices: milliseconds of",
        "compute, and of collectives within a slice with the share of them that compute does not wait for.",
        "",
        f"| topology | flags | compute | {' | '.join(CLASSES)} |",
        "|" + " --- |" * (len(CLASSES) + 3),
    ]
    for topology, flags in CASES:
        row = kept.rows.get(f"{topology} {flags}".strip())
        if row:
            said = {"": "none", SPARSE: "SparseCores"}.get(flags, "SparseCores, gathers kept")
            lines.append(f"| {topology} | {said} | {row['cells']} |")
    lines += ["", f"SparseCores: `{SPARSE}`; gathers kept: `{KEPT}` as well."]
    TABLE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
