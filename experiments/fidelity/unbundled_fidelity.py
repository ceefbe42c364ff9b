"""Plans for programs outside the bundled families, predicted against the result of the real TPU compiler.

    python experiments/fidelity/unbundled_fidelity.py [--only TEXT ...] [--again] [--predict] [--whole]

The programs are training steps with AdamW: convolutions, recurrences, graphs, tables, narrow minor dims. Rows run as in
`compile_fidelity.py`, with its compiled programs. Results are saved by row in
`experiments/results/unbundled_fidelity.json`. No constant is fitted to these rows.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.program import Program

from experiments.fidelity.compile_fidelity import Matrix, Row, dm, main


def step(module: str, name: str, *sizes: Any) -> "Callable[[], Program]":
    """Return a training step of a program by its name."""

    def make() -> "Program":
        import importlib

        from experiments.lib.programs.jax_case import train_program

        return train_program(
            name, getattr(importlib.import_module(f"experiments.lib.programs.{module}"), name)(*sizes), "adamw"
        )

    return make


MATRIX = Matrix(
    __file__,
    "Programs outside the bundled families against the TPU compiler",
    (
        Row("unet-v5e", step("jax_programs", "unet", (128, 256, 512), 64, 128), "v5e:2x4", {"data": 8}),
        Row("resnet-v4", step("jax_others", "residual_network", 64, (3, 4, 6, 3), 224, 1024), "v4:2x2x2", {"data": 8}),
        Row("lstm-v5e", step("jax_others", "lstm", 1024, 2, 32000, 256, 128), "v5e:2x4", dm(4, 2)),
        Row("state-space-v6e", step("jax_programs", "state_space", 1024, 2048, 64, 2048, 4), "v6e:4x4", dm(8, 2)),
        Row("graph-v5e", step("jax_programs", "graph_network", 1 << 17, 1 << 20, 128), "v5e:2x4", {"data": 8}),
        Row(
            "tables-v5p", step("jax_programs", "embedding_tables", 26, 1 << 20, 64, 65536, 1024), "v5p:2x2x2", dm(4, 2)
        ),
        Row(
            "retention-v5p", step("jax_others", "retention", 2048, 16, 12, 32000, 64, 4096, 512), "v5p:2x2x4", dm(4, 4)
        ),
        Row("wave-v6e", step("jax_others", "wave_network", 128, 24, 64, 16384), "v6e:2x4", {"data": 8}),
        Row("perceiver-v6e", step("jax_others", "perceiver", 1024, 512, 16, 3, 64, 16384), "v6e:2x4", dm(4, 2)),
        Row("radiance-v5e", step("jax_others", "radiance_field", 256, 8, 16384, 128), "v5e:2x4", {"data": 8}),
    ),
)


if __name__ == "__main__":
    sys.exit(main(MATRIX))
