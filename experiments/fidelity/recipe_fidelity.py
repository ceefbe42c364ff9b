"""Recipes of training steps against the real TPU compiler.

    python experiments/fidelity/recipe_fidelity.py [--only TEXT ...] [--again] [--predict] [--whole]

The recipes vary attention's kernel, the values that are saved, recomputed or offloaded, microbatches, and state on the
hosts. Rows run as in `compile_fidelity.py`, with its compiled programs. Results are saved by row in
`experiments/results/recipe_fidelity.json`.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.program import Program

from experiments.fidelity.compile_fidelity import EXPERTS, SMALL, WIDE, Matrix, Row, dm, main, train
from experiments.lib.programs.compile_programs import hf, llama


RAGGED = {"attention": "splash", "experts": "ragged:4"}
PARTS = {"attention": "splash", "microbatches": 4}
FEW = llama(4, 4096, 11008, 32, 8, 32000)
QKV = "q_proj/k_proj/v_proj"


def value(config: Any, batch: int, seq: int, policy: str) -> "Callable[[], Program]":
    """Return a training step that saves or offloads single values of its layers, with splash attention."""
    return train(config, batch, seq, f"full,{policy}", attention="splash")


MATRIX = Matrix(
    __file__,
    "Recipes predicted against the TPU compiler",
    (
        Row("llama-splash-v5p", train(WIDE, 64, 4096, attention="splash"), "v5p:2x2x4", dm(4, 4)),
        Row("llama-splash-dots-v6e", train(WIDE, 32, 2048, "dots", attention="splash"), "v6e:4x4", dm(4, 4)),
        Row("llama-splash-parts-v5p", train(WIDE, 64, 2048, "none", **PARTS), "v5p:2x2x4", dm(8, 2)),
        Row("gpt2-xl-splash-v5e", train("gpt2-xl", 64, 1024, attention="splash"), "v5e:4x4", dm(16, 1)),
        Row("gpt2-xl-parts-v6e", train("gpt2-xl", 128, 1024, "dots", microbatches=4), "v6e:4x4", dm(8, 2)),
        Row("experts-splash-v5p", train(EXPERTS, 32, 2048, attention="splash"), "v5p:2x2x4", dm(4, 4)),
        Row("experts-splash-parts-v6e", train(EXPERTS, 32, 1024, **PARTS), "v6e:4x4", dm(4, 4)),
        Row("experts-ragged-v6e", train(EXPERTS, 32, 1024, **RAGGED), "v6e:4x4", dm(4, 4)),
        Row("gemma2-splash-v6e", train("gemma2-9b", 16, 8192, attention="splash"), "v6e:4x4", dm(4, 4)),
        Row("gemma2-parts-v5p", train("gemma2-9b", 32, 2048, microbatches=2), "v5p:2x2x4", dm(8, 2)),
        Row("bert-splash-v5e", train("bert-large", 64, 512, "none", attention="splash"), "v5e:2x4", dm(8, 1)),
        Row("bert-parts-v5e", train("bert-large", 128, 512, "dots", microbatches=2), "v5e:2x4", dm(4, 2)),
        Row("llama-keep-v6e", value(FEW, 32, 2048, f"keep={QKV}/context"), "v6e:4x4", dm(16, 1)),
        Row("llama-input-v5p", value(FEW, 64, 4096, "offload=input"), "v5p:2x2x4", dm(16, 1)),
        Row("llama-offload-v5p", value(FEW, 64, 4096, "keep=gate_proj,offload=context/input"), "v5p:2x2x4", dm(8, 2)),
        Row("gpt2-xl-offload-v5e", value("gpt2-xl", 64, 1024, "keep=c_attn,offload=c_fc"), "v5e:4x4", dm(16, 1)),
        Row("llama-host-v5e", train(SMALL, 16, 2048, attention="splash", host="optimizer"), "v5e:2x4", dm(8, 1)),
        Row(
            "llama3-8b-host-v5e", train("llama3-8b", 8, 4096, attention="splash", host="optimizer"), "v5e:2x4", dm(8, 1)
        ),
        Row("llama-host-v5p", train(WIDE, 64, 2048, attention="splash", host="optimizer"), "v5p:2x2x4", dm(8, 2)),
        Row("llama-host-parts-v5p", train(WIDE, 32, 2048, **PARTS, host="optimizer"), "v5p:2x2x4", dm(4, 4)),
        Row("vit-parts-v6e", hf("vit-l16", train=True, batch=256, microbatches=4), "v6e:4x4", dm(16, 1)),
    ),
)


if __name__ == "__main__":
    sys.exit(main(MATRIX))
