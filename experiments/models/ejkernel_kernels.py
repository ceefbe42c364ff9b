"""Pallas kernels of ejkernel for TPUs, planned: dims that their grids allow to split, and dims that stay whole.

    python experiments/models/ejkernel_kernels.py [--ejkernel FOLDER]

ejkernel has requirements that this environment need not have. Install it to a folder with `pip install --no-deps
--target FOLDER ejkernel==0.0.80.3 beartype einops chex toolz`, and pass the folder. The table is
`experiments/results/ejkernel_kernels.md`.
"""

import argparse
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

TABLE = Path(__file__).parents[1] / "results" / "ejkernel_kernels.md"
TOPOLOGY, MESH = "v5e:2x4", {"data": 2, "model": 4}
BATCH, SEQ, HEADS, OF_KEYS, CHANNELS = 8, 1024, 8, 4, 128


def programs() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]:
    """Yield each kernel's name, its function, the shapes of its arguments, and the arguments to differentiate."""
    import jax
    from ejkernel import Backend, Platform, kernel_registry  # pyrefly: ignore

    def kernel(name: str, **fixed: Any) -> Callable[..., Any]:
        registered = kernel_registry.get(name, platform=Platform.PALLAS, backend=Backend.TPU)
        return lambda *args: registered(*args, **fixed)

    def bf16(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    def ids(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "int32")

    positions = bf16(BATCH, SEQ, HEADS, CHANNELS), *[bf16(BATCH, SEQ, OF_KEYS, CHANNELS)] * 2
    heads = bf16(BATCH, HEADS, SEQ, CHANNELS), *[bf16(BATCH, OF_KEYS, SEQ, CHANNELS)] * 2
    grouped = bf16(4096, 512), bf16(8, 512, 1024), ids(8)
    decoded = bf16(BATCH, HEADS, CHANNELS)
    pages = [bf16(OF_KEYS, 64, 16, CHANNELS)] * 2
    yield "flash_attention", kernel("flash_attention", causal=True), positions, (0, 1, 2)
    yield "blocksparse_attention", kernel("blocksparse_attention", causal=True), heads, (0, 1, 2)
    for name in ("grouped_matmul", "grouped_matmulv2", "grouped_matmulv3"):
        yield name, kernel(name), grouped, (0, 1)
    yield "fused_cross_entropy", kernel("fused_cross_entropy"), (bf16(1024, 32768), ids(1024)), (0,)
    yield "ragged_decode_attention", kernel("ragged_decode_attention"), (decoded, *positions[1:], *[ids(BATCH)] * 2), ()
    yield "page_attention", kernel("page_attention"), (decoded, *pages, ids(BATCH), ids(BATCH, 8)), ()


def row(name: str, mode: str, fn: Callable[..., Any], args: tuple[Any, ...], of: tuple[int, ...]) -> str:
    """Return one line of the table."""
    import jax

    import autoshard
    from autoshard.graph import FactorKind, read_graph

    def loss(*given: Any) -> Any:
        return jax.tree.leaves(fn(*given))[0].astype("float32").sum()

    try:
        program = autoshard.trace(jax.grad(loss, of) if mode == "gradient" else fn, args, name=name)
        plan = autoshard.plan(program, topology=TOPOLOGY, mesh=MESH)
    except autoshard.UserError as error:
        return f"| `{name}` | {mode} | refused | {error} |"
    read: dict[str, None] = {}
    for op in read_graph(program.module).ops:
        if op.opaque is None:
            continue
        target = op.opaque.target.split("_block_kv")[0]
        free = {FactorKind.PARALLEL: [], FactorKind.REDUCTION: []}
        for size, kind in zip(op.rule.sizes, op.rule.kinds, strict=True) if op.rule else ():
            if kind in free and size > 1:
                free[kind].append(str(size))
        parts = [" x ".join(free[FactorKind.PARALLEL])]
        parts += [f"sums over {' x '.join(free[FactorKind.REDUCTION])}"] if free[FactorKind.REDUCTION] else []
        read[f"`{target}`: {', '.join(filter(None, parts)) or 'whole'}"] = None
    whole = [line for line in plan.warnings if "`autoshard.register_rule` can" in line]
    return f"| `{name}` | {mode} | {'; '.join(read)} | {'; '.join((*plan.words, *whole))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ejkernel", type=Path, metavar="FOLDER", help="where ejkernel was installed beside")
    folder = parser.parse_args().ejkernel
    if folder is not None:
        sys.path.insert(0, str(folder))
    if importlib.util.find_spec("ejkernel") is None:
        print("ejkernel is not installed: install it, or give the folder that it was installed to with --ejkernel.")
        return
    warnings.simplefilter("ignore")
    import ejkernel as ejkernel  # pyrefly: ignore[missing-import]

    os.environ["XLA_FLAGS"] = ""  # ejkernel sets flags of GPUs, which this jaxlib does not know
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu

    if not hasattr(tpu, "repeat"):
        tpu.repeat = lambda x, repeats, axis: jnp.concatenate([x] * repeats, axis=axis)  # pyrefly: ignore
    lines = [
        "# Pallas kernels of ejkernel 0.0.80.3",
        "",
        "`python experiments/models/ejkernel_kernels.py`. What each grid says may be split (sizes of what a device",
        "may have a",
        f"part of), and the plan on {TOPOLOGY}, mesh `data=2,model=4`. Its attention kernels call `pltpu.repeat`,",
        "which jax 0.10.2 has no more; a concatenation stands in for it.",
        "",
        "| kernel | mode | read from the grid | plan |",
        "| --- | --- | --- | --- |",
    ]
    for name, fn, args, of in programs():
        for mode in ("forward", "gradient") if of else ("forward",):
            lines.append(row(name, mode, fn, args, of))
            print(lines[-1], flush=True)
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
