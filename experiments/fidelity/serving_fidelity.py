"""Steps of prefill and decoding on v5e, v5p and v6e, predicted against the result of the real TPU compiler.

    python experiments/fidelity/serving_fidelity.py [--only TEXT ...] [--again] [--predict]

Rows run as in `compile_fidelity.py`, with its compiled programs. Results are saved by row in
`experiments/results/serving_fidelity.json`.
"""

import sys
from collections.abc import Callable
from typing import Any

from experiments.fidelity.compile_fidelity import ROWS, Matrix, Row, dm, main, serve


SERVING = tuple(row for row in ROWS if row.name.startswith(("prefill-", "decode-")))


def cached(config: str, batch: int, seq: int, places: int) -> Callable[[], Any]:
    """Return a step of decoding by the kernel over a cache of `places` tokens, of which it attends to `seq`."""
    return serve(config, "decode", batch, seq, cache=places, attention="cached")


MATRIX = Matrix(
    __file__,
    "Serving steps predicted against the TPU compiler",
    (
        *SERVING,
        Row("prefill-8b-v5e", serve("llama3-8b", "prefill", 4, 4096), "v5e:4x4", dm(4, 4)),
        Row("prefill-8b-v6e-longer-cache", serve("llama3-8b", "prefill", 8, 2048, cache=8192), "v6e:2x4", dm(2, 4)),
        Row("prefill-70b-v6e", serve("llama3-70b", "prefill", 4, 4096), "v6e:4x4", dm(4, 4)),
        Row("decode-8b-v6e-120", serve("llama3-8b", "decode", 120, 8192), "v6e:2x4", dm(2, 4)),
        Row("decode-8b-v6e-uneven", serve("llama3-8b", "decode", 12, 8192), "v6e:2x4", dm(8, 1)),
        Row("decode-8b-v6e-one", serve("llama3-8b", "decode", 1, 65536), "v6e:2x4", dm(1, 8)),
        Row("decode-8b-v6e-cached-quarter", cached("llama3-8b", 96, 2048, 8192), "v6e:2x4", dm(2, 4)),
        Row("decode-8b-v6e-cached-full", cached("llama3-8b", 96, 8192, 8192), "v6e:2x4", dm(2, 4)),
        Row("decode-8b-v5p", serve("llama3-8b", "decode", 256, 8192), "v5p:2x2x2", dm(2, 4)),
        Row("decode-70b-v6e", serve("llama3-70b", "decode", 32, 8192), "v6e:4x4", dm(8, 2)),
        Row("decode-70b-v5p", serve("llama3-70b", "decode", 128, 8192), "v5p:2x2x4", dm(4, 4)),
        Row("decode-70b-v5e", serve("llama3-70b", "decode", 16, 4096), "v5e:4x4", dm(2, 8)),
        Row("decode-experts-v5p", serve("mixtral-8x7b", "decode", 128, 8192), "v5p:2x2x4", dm(4, 4)),
        Row("decode-gpt2-v5e", serve("gpt2-xl", "decode", 128, 1024), "v5e:2x4", dm(8, 1)),
    ),
)


if __name__ == "__main__":
    sys.exit(main(MATRIX))
