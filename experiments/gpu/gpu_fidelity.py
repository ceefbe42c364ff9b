"""Plans for H100s against the real GPU compiler, with no GPU.

    python experiments/gpu/gpu_fidelity.py [--only TEXT ...] [--again] [--predict]

The rows are steps for 8 and for 256 H100s, serving, and the programs of `gpu_programs.py` on one. Rows run as in
`compile_fidelity.py`, with its compiled programs. Results are saved by row in `experiments/results/gpu_fidelity.json`.
The compiler is part of JAX's CUDA plugin (`autoshard[cuda]`).
"""

import sys

from experiments.fidelity.compile_fidelity import Matrix, Row, main, serve, train
from experiments.lib.programs.compile_programs import hf, jax_mlp, llama, mixtral
from experiments.lib.programs.gpu_programs import PROGRAMS


LLAMA, EXPERTS = llama(8, 2048, 5632, 16, 8, 32000), mixtral(4, 1024, 3584, 16, 8, 8, 32000)
ONE, MANY = "h100:8", "h100:8*32"
TWO, FAR = {"data": 4, "model": 2}, {"data": 64, "model": 4}


MATRIX = Matrix(
    __file__,
    "Plans for H100s against the GPU compiler",
    (
        Row("llama-8", train(LLAMA, 16, 2048, attention="cudnn"), ONE, TWO),
        Row("llama-fsdp-8", train(LLAMA, 16, 2048, attention="cudnn"), ONE, {"data": 8}, "fsdp"),
        Row("llama-tp-8", train(LLAMA, 16, 2048, attention="cudnn"), ONE, TWO, "fsdp_tp_sp"),
        Row("llama-plain-8", train(LLAMA, 16, 1024, remat="full"), ONE, TWO),
        Row("experts-8", train(EXPERTS, 16, 1024, attention="cudnn"), ONE, TWO),
        Row("vit-8", hf("vit-l16", train=True, batch=64), ONE, TWO),
        Row("bert-8", hf("bert-large", train=True, batch=32, seq=512), ONE, TWO),
        Row("resnet-8", hf("resnet-50", train=True, batch=256), ONE, {"data": 8}),
        Row("mlp-8", jax_mlp(8, 4096, 4096), ONE, TWO),
        Row("llama-256", train(LLAMA, 512, 2048, attention="cudnn"), MANY, FAR),
        Row("llama-fsdp-256", train(LLAMA, 512, 2048, attention="cudnn"), MANY, {"data": 256}, "fsdp"),
        Row("experts-256", train(EXPERTS, 512, 1024, attention="cudnn"), MANY, FAR),
        Row("vit-256", hf("vit-l16", train=True, batch=1024), MANY, FAR),
        Row("mlp-256", jax_mlp(8, 4096, 16384), MANY, FAR),
        Row("prefill-8b-8", serve("llama3-8b", "prefill", 16, 4096, attention="cudnn"), ONE, TWO),
        Row("decode-8b-8", serve("llama3-8b", "decode", 64, 8192), ONE, TWO),
        Row("decode-70b-8", serve("llama3-70b", "decode", 32, 4096), ONE, {"data": 1, "model": 8}),
        *(Row(f"one-{name}", sized.program, "h100:1", {"data": 1}) for name, sized in PROGRAMS.items()),
    ),
    "the compiler of JAX's CUDA plugin, no GPU",
)


if __name__ == "__main__":
    sys.exit(main(MATRIX))
