"""Time in which auto-sharding inside PyTorch/XLA plans the first step of a model, without and with a cached decision.

    python experiments/torch_xla/torch_xla_planning.py [--only TEXT ...] [--again] [--table]

A script trains a model of Hugging Face in a process of its own, on 8 CPU devices in a mesh of 4 x 2. It stops once the
first step is planned, and does not run the step. Three parts are timed: reading the pending graph, the decision (the
planner's work), and everything from the step's end until its planned run could begin. `again` is a second process,
which finds the decision of the first in the cache. Figures are wall seconds, and in brackets processor
seconds. `loop` is the time of twenty million additions in Python just before. It shows the speed of a shared machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from experiments.lib.harness import ROOT, Experiment, Rows, grid, page


MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "gpt2-small": ("gpt2", {}, (8, 128)),
    "bert-base": ("bert", {}, (8, 128)),
    "llama-160m": (
        "llama",
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        (8, 128),
    ),
}
"""Type of the model, its fields that differ from the defaults, and (rows, tokens) of a batch."""
PARTS = ("read", "decide", "everything")


def plan_first_step(name: str) -> dict[str, Any]:
    """Return wall and processor seconds of each part, in the process of the script."""
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", XLA_AUTO_SPMD_MESH="4,2")
    import torch
    import torch_xla
    import torch_xla.runtime as xr
    import transformers

    import autoshard.torch_xla
    from autoshard.exec.torch_xla_hook.lifecycle import hook_session

    took: dict[str, list[float]] = {}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                took[part] = [time.perf_counter() - began[0], time.process_time() - began[1]]

        return run

    class Planned(BaseException):
        """Raised once the first step is planned, since the script then ends."""

    whole = timed("everything", hook_session.Session._plan)

    def planned(*args: Any) -> Any:
        whole(*args)
        raise Planned

    modules: Any = hook_session
    modules.capture = timed("read", hook_session.capture)
    modules.kept_decision = timed("decide", hook_session.kept_decision)
    modules.Session._plan = planned
    kind, options, (rows, tokens) = MODELS[name]
    xr.use_spmd(**{"auto": True})
    config = transformers.AutoConfig.for_model(kind, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).to("xla").train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, config.vocab_size, (rows, tokens)).to("xla")
    try:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        torch_xla.sync()
    except Planned:
        pass
    session = autoshard.torch_xla.session()
    assert session is not None
    (plan,) = session.plans
    size = sum(parameter.numel() for parameter in model.parameters())
    return took | {"parameters": size, "step_ms": 1e3 * plan.prediction.step_time_s}


def measured(name: str) -> dict[str, Any]:
    """Run two processes, the second with the cache of the first, and return their times."""
    began = time.perf_counter()
    for _ in range(20_000_000):
        pass
    row: dict[str, Any] = {"loop": time.perf_counter() - began}
    with tempfile.TemporaryDirectory() as cache:
        for which in ("first", "again"):
            done = subprocess.run(
                [sys.executable, __file__, "--process", name],
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "AUTOSHARD_CACHE_DIR": cache},
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
            if not lines:
                raise RuntimeError(done.stderr[-2000:])
            row[which] = json.loads(lines[0].removeprefix("found "))
    return row


def table(rows: Rows) -> str:
    heads = [f"{part} s, {which}" for which in ("first", "again") for part in PARTS]
    lines = []
    for name, row in rows.items():
        cells = [name, f"{row['first']['parameters'] / 1e6:.0f} M", "x".join(map(str, MODELS[name][2]))]
        for which in ("first", "again"):
            cells += [f"{row[which][part][0]:.2f} ({row[which][part][1]:.2f})" for part in PARTS]
        lines.append([*cells, f"{row['first']['step_ms']:.0f}", f"{row['loop']:.2f}"])
    return page(
        "# How long the hook plans a first step",
        *str(__doc__).split("\n\n")[2:],
        grid(" | ".join(["model", "parameters", "batch", *heads, "predicted ms", "loop s"]), lines),
    )


def main() -> int:
    if sys.argv[1:2] == ["--process"]:
        print("found " + json.dumps(plan_first_step(sys.argv[2])), flush=True)
        os._exit(0)  # torch_xla takes seconds to end
    return Experiment(script=__file__, names=MODELS, work=measured, table=table).run()


if __name__ == "__main__":
    sys.exit(main())
