"""Training steps in stages of a pipeline against the real TPU compiler.

    python experiments/fidelity/pipeline_fidelity.py [--only TEXT ...] [--again] [--predict]

Stages are on an axis of the torus, on one next to tensor parallelism, or on slices. Some rows have layers that the
stages do not divide, and some run in rounds. Rows run as in `compile_fidelity.py`, with its compiled programs. Results
are saved by row in `experiments/results/pipeline_fidelity.json`.
"""

import sys

from experiments.fidelity.compile_fidelity import Matrix, Row, main, train
from experiments.lib.programs.compile_programs import llama


EIGHT, SEVEN = (llama(layers, 4096, 11008, 32, 8, 32000) for layers in (8, 7))
TORUS, SLICES = {"stage": 4, "data": 8, "model": 4}, {"stage": 2, "data": 16, "model": 4}
ONCE, AROUND = {"microbatches": 8, "schedule": "gpipe"}, {"microbatches": 8, "schedule": "circular:2"}


MATRIX = Matrix(
    __file__,
    "Pipelines predicted against the TPU compiler",
    (
        Row("gpipe-v5p", train(EIGHT, 256, 2048, attention="splash", stages=4, **ONCE), "v5p:4x4x8", TORUS),
        Row("circular-v5p", train(EIGHT, 256, 2048, attention="splash", stages=4, **AROUND), "v5p:4x4x8", TORUS),
        Row("gpipe-outside-v5p", train(SEVEN, 256, 2048, attention="splash", stages=4, **ONCE), "v5p:4x4x8", TORUS),
        Row("gpipe-v6e", train(EIGHT, 256, 2048, attention="splash", stages=2, **ONCE), "v6e:8x8*2", SLICES),
        Row("circular-v6e", train(EIGHT, 256, 2048, attention="splash", stages=2, **AROUND), "v6e:8x8*2", SLICES),
    ),
)


if __name__ == "__main__":
    sys.exit(main(MATRIX))
