"""Collectives that compiler flags let compute hide, by generation: the basis of `autoshard/cost/compiler_flags.py`.

    python experiments/fidelity/overlap_by_compiler_flags.py [--only TEXT ...] [--again] [--table]

An MLP of 4 scanned layers of 4096 x 16384 is compiled for each topology with no TPU, by default and with its flags.
FSDP spans all devices with 16384 rows on each device, so that compute lasts longer than all communication. The schedule
is walked (`autoshard.exec.estimate`).

The table is `experiments/results/overlap_by_compiler_flags.md`. It lists gathers and sums; sums include gathers that
the compiler turns into all-reduces. For each it has the milliseconds on the links and the share that compute hides.
"""

import sys
from typing import TYPE_CHECKING, Any

from experiments.fidelity.overlap import CLASSES, hidden
from experiments.lib.harness import Experiment, Rows, grid, own_parser, page


if TYPE_CHECKING:
    from autoshard.program import Program

LAYERS, WIDTH, INNER, ROWS = 4, 4096, 16384, 16384


def sparse_cores(*kinds: str) -> str:
    return " ".join(f"--xla_tpu_enable_sparse_core_collective_offload_{kind}=true" for kind in kinds)


SPARSE = sparse_cores("all_gather", "all_reduce", "reduce_scatter")
KEPT = "--xla_tpu_prefer_async_allgather_to_allreduce=true"
CASES = {
    f"{topology} | {flags}": (topology, flags)
    for topology, flags in (
        ("tpu7x:4x4x4", "none"),
        ("v5p:2x2x2", "none"),
        ("v5p:2x2x2", "SparseCores"),
        ("v6e:4x4", "none"),
        ("v6e:4x4", "SparseCores"),
        ("v5p:4x4x4", "SparseCores"),
        ("v5p:4x4x4", "SparseCores, gathers kept"),
    )
}
FLAGS = {"none": "", "SparseCores": SPARSE, "SparseCores, gathers kept": f"{SPARSE} {KEPT}"}
"""Compiler flags by name."""


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


def judged(name: str, time_limit: float) -> dict[str, list[str]]:
    """Return the cells of one row.

    Raises `UserError` if the program cannot be compiled.
    """
    from autoshard.cost import Topology, make_mesh
    from autoshard.exec import estimate
    from autoshard.exec.ahead.ahead_process import compile_without_devices
    from autoshard.exec.hlo.hlo_text import parse_hlo
    from autoshard.planning import Options, make_plan, read_asked

    topology, flags = CASES[name]
    count = Topology.parse(topology).num_devices
    program = mlp(count)
    asked = read_asked({"params.0": "-,data,-", "params.1": "-,-,data"}, None, None, None, None)
    mesh = {"data": count}
    made = make_plan(
        program, Options(topology=topology, mesh=mesh, xla_flags=FLAGS[flags], calibration=False, asked=asked)
    )
    text = compile_without_devices(program, made.plan, time_limit).text
    schedule = estimate(parse_hlo(text), make_mesh(Topology.parse(topology), made.plan.mesh))
    cells = (hidden(schedule, kinds, far=False) for kinds in CLASSES.values())
    return {"cells": [f"{1e3 * schedule.compute_s:.1f}", *cells]}


def table(rows: Rows) -> str:
    return page(
        "# What compiler flags let compute hide",
        """
`python experiments/fidelity/overlap_by_compiler_flags.py`; libtpu, no TPU. An MLP of 4 layers with FSDP over all \
devices: milliseconds of
compute, and of collectives within a slice with the share of them that compute does not wait for.
""",
        grid(
            f"topology | flags | compute | {' | '.join(CLASSES)}", ([name, *row["cells"]] for name, row in rows.items())
        ),
        f"SparseCores: `{SPARSE}`; gathers kept: `{KEPT}` as well.",
    )


def main() -> int:
    given = own_parser(time_limit=1200.0).parse_args()
    return Experiment(script=__file__, names=CASES, work=lambda name: judged(name, given.time_limit), table=table).run(
        given
    )


if __name__ == "__main__":
    sys.exit(main())
