"""Tiny models of transformers through torch's own functionalization: how many work, why others fail, and what is lost.

    python experiments/models/functionalization.py [--minutes 25] [--only TYPE]

The types are those that `results/models.json` lists as planned for training, in a pseudorandom order. Each computes a
loss in the mode that autoshard traces: dropout off, batch norms on. Experts are batched matmuls, and the values of
small constants are known while torch traces; both help. Each type has its own process and time limit. A type that does
not run in eager torch on our inputs is counted separately. Rows are saved in `results/functionalization.json`.
"""

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.lib.functionalized import WAYS, compare, lower, step_of, table
from experiments.lib.saved_results import Results
from experiments.models.models import ROWS, _load


TABLE = Path(__file__).parents[1] / "results" / "functionalization.md"
LIMIT_S = 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25, help="time for all types; 0: only the tables")
    parser.add_argument("--only", metavar="TYPE", help="this type alone, its row printed")
    options = parser.parse_args()
    results = Results(TABLE.with_suffix(".json"))
    listed = json.loads(ROWS.read_text())
    types = [kind for kind, row in listed.items() if row["train"] == "works" and options.only in (None, kind)]
    types.sort(key=lambda kind: hashlib.sha256(kind.encode()).digest())
    end = time.monotonic() + 60 * options.minutes
    _load()
    for kind in types:
        if kind not in results.rows and time.monotonic() < end or options.only:
            row = in_process(kind, listed[kind]["rung"])
            print(kind, json.dumps(row), flush=True)
            if not options.only:
                results.keep(kind, row)
    print(table(results.rows))


def in_process(kind: str, rung: int) -> dict[str, Any]:
    """Return the outcome of a type in a process of its own with a time limit."""
    path = Path(tempfile.mkdtemp()) / "row.json"
    start = time.monotonic()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(kind, rung, path))
    worker.start()
    worker.join(LIMIT_S)
    if late := worker.is_alive():
        worker.kill()
        worker.join()
    row = json.loads(path.read_text()) if path.exists() else {}
    if late or worker.exitcode:
        missing = next((way for way in ("eager", *WAYS) if way not in row), "dropout")
        row[missing] = f"not done within {LIMIT_S} s" if late else f"ended with {worker.exitcode}"
    return row | {"seconds": round(time.monotonic() - start, 1)}


def work(kind: str, rung: int, path: Path) -> None:
    """Try every way on one type, and write each outcome to `path` at once."""
    import torch
    from torch._export.utils import _compiling_state_context
    from torch._subclasses import fake_tensor
    from torch.func import functional_call, functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # These are the settings of autoshard's trace: no checks of values, and no opaque operation for a whole layer.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    torch.distributions.Distribution.set_default_validate_args(False)
    torch.backends.mha.set_fastpath_enabled(False)
    row: dict[str, Any] = {}

    def attempt(way: str, run: Callable[[], Any]) -> Any:
        try:
            made = run()
            row[way] = "works"
        except Exception as error:
            frames = [each for each in traceback.extract_tb(error.__traceback__) if "/models/" in each.filename]
            place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            row[way] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"
            made = None
        path.write_text(json.dumps(row))
        return made

    # A form may be planned but fail in eager torch; then a larger form is tried.
    forms = (attempt(f"eager {number}", functools.partial(step_of, kind, number)) for number in range(rung, 3))
    step, inputs = next((form for form in forms if form is not None), (None, {}))
    row["eager"] = row[f"eager {rung}"] if step is None else "works"
    path.write_text(json.dumps(row))
    if step is None:
        return
    # Known values of constants help some types and harm others.
    for limit in (1 << 16, 1):
        setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", limit)  # noqa: B010
        exported = attempt("export", lambda: torch.export.export(step, (), inputs, strict=False))
        plain = None if exported is None else attempt("decomposed", exported.run_decompositions)
        if exported is not None and plain is not None:
            row["nodes"] = len(exported.graph.nodes)
            attempt("lowered", functools.partial(lower, plain))
            break
    setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 1 << 16)  # noqa: B010
    tensors = dict(step.named_parameters()) | dict(step.named_buffers())

    def call(tensors: Any, inputs: Any) -> Any:
        with _compiling_state_context():  # so that transformers' code reads fewer values
            return functional_call(step, tensors, (), inputs)

    trace = make_fx(functionalize(call), tracing_mode="fake", _allow_non_fake_inputs=True)
    attempt("functionalize", lambda: trace(tensors, inputs))
    if plain is not None:
        attempt("equal", functools.partial(compare, step, plain, inputs))
    step.train()
    attempt("dropout", lambda: torch.export.export(step, (), inputs, strict=False).run_decompositions())


if __name__ == "__main__":
    main()
