"""Losses of torch's own functionalization for torch programs that it accepts.

    python experiments/models/functionalization_losses.py

The programs are the 341 modules of one feature each of `random_modules.py`, which autoshard traces as eager torch
computes them. Loss, gradients and buffers of the exported graph are compared with those of eager torch. Then the script
counts remaining marks of rematerialisation. It compares size and time of a deep decoder with autoshard's own trace. The
script prints the tables of `results/functionalization.md`.
"""

import collections
import time
import warnings
from typing import Any

from experiments.correctness.random_modules import alone
from experiments.lib.functionalized import compare
from experiments.models.models import _load


def main() -> None:
    _load()
    warnings.simplefilter("ignore")
    marks()
    features()
    decoder()


def features() -> None:
    """Print the outcome of each module of one feature, and the features that are not equal."""
    import torch

    from autoshard.program.torch.module_mode import evaluation_mode
    from tests.random_modules import build, inputs, loss

    class Step(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, args: Any, kwargs: Any) -> Any:
            return loss(self.module(*args, **kwargs))

    outcomes, others = collections.Counter[str](), collections.Counter[str]()
    for recipe in alone():
        given: dict[str, Any] = dict(zip(("args", "kwargs"), inputs(recipe), strict=True))
        step, twin = Step(build(recipe)), Step(build(recipe))
        for each in (step, twin):
            evaluation_mode(each, True)
        try:
            exported = torch.export.export(step, (), given, strict=False).run_decompositions()
        except Exception as error:
            outcome = f"refused: {type(error).__name__}: {' '.join(str(error).split())[:70]}"
        else:
            try:
                compare(twin, exported, given)
                outcome = "equal"
            except Exception as error:
                outcome = f"differs: {type(error).__name__}: {' '.join(str(error).split())[:70]}"
        outcomes[outcome.partition(":")[0]] += 1
        if outcome != "equal":
            others[f"{recipe.words} | {outcome}"] += 1
    print(dict(outcomes))
    for text, count in others.most_common():
        print(f"| {text} | {count} |")


def marks() -> None:
    """Print the number of marks of checkpointed layers, and of `no_grad`, that remain in the graph."""
    import torch
    from torch.utils.checkpoint import checkpoint

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x: Any = checkpoint(layer, x, use_reentrant=False)
            with torch.no_grad():
                scale = (x * x).sum()
            return (x / scale).sum()

    for strict in (False, True):
        try:
            exported = torch.export.export(Layers(), (torch.ones(2, 8),), strict=strict)
        except Exception as error:
            print(f"strict={strict}: {type(error).__name__}: {str(error)[:120]}")
            continue
        for name, each in (("exported", exported), ("decomposed", exported.run_decompositions())):
            targets = [str(node.target) for node in each.graph.nodes if node.op == "call_function"]
            counts = [target for target in targets if "checkpoint" in target or "grad" in target]
            print(f"strict={strict} {name}: {counts} of {targets}")


def decoder() -> None:
    """Print seconds and sizes of llama3-8b by layers: exported, and as autoshard traces a whole training step."""
    import torch

    from autoshard.program.config_files import read_config
    from autoshard.program.hf.hf_model import build_model
    from autoshard.program.hf.hf_program import from_config

    fields = read_config("llama3-8b")[1]

    class Step(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, labels: Any) -> Any:
            logits = self.model(input_ids=ids, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1))

    for layers in (2, 8, 32):
        cut = {**fields, "num_hidden_layers": layers}
        model = build_model("llama", cut, "bfloat16").to("meta")
        model.config._attn_implementation = "eager"
        ids = torch.zeros(8, 1024, dtype=torch.int64, device="meta")
        start = time.perf_counter()
        exported = torch.export.export(Step(model), (ids, ids), strict=False)
        seconds = {"export": time.perf_counter() - start}
        plain = exported.run_decompositions()
        seconds["with decompositions"] = time.perf_counter() - start
        nodes = [node for node in plain.graph.nodes if node.op == "call_function"]
        counts = {"nodes": len(nodes), "parameters by name": len(plain.graph_signature.parameters)}
        counts |= {key: sum(key in node.meta for node in nodes) for key in ("stack_trace", "nn_module_stack")}
        for scan in (True, False):
            start = time.perf_counter()
            program = from_config(cut, train=True, batch=8, seq=1024, scan=scan)
            seconds[f"autoshard scan={scan}"] = time.perf_counter() - start
            counts |= {f"bytes scan={scan}": len(program.module), f"arguments scan={scan}": len(program.arguments)}
        print(layers, {key: round(value, 1) for key, value in seconds.items()}, counts, flush=True)


if __name__ == "__main__":
    main()
