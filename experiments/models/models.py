"""Every model type of the installed transformers in a small form: is it planned, for training and for decoding?

    python experiments/models/models.py [--only TEXT] [--again] [--refused] [--jobs N] [--table]

Each type is planned on v5e:2x2 with `data=4` in a process of its own with a time limit. Rows are saved in
results/models.json. A run computes the missing rows, `--refused` the rows refused in either way too, and `--again` all
that `--only` names. `--table` only writes docs/models.md again.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any


HERE = Path(__file__).parents[1]
ROWS = HERE / "results" / "models.json"
PAGE = HERE.parent / "docs" / "models.md"
LIMIT_S = 150
MEMORY = 6 << 30
BATCH, SEQ = 8, 64
SURE = ("asks for the values", "has no lowering", "is not supported", "no task head", "has no `logits`")
"""Texts of refusals that hold for any size, so that a larger form need not be tried."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="types whose name contains it; `=NAME` is one type")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--refused", action="store_true", help="also rows that were refused")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only write the page")
    options = parser.parse_args()
    rows: dict[str, Any] = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    if options.table:
        write_page(rows)
        return
    _load()
    # The order is pseudorandom, so that an interrupted run has a fair sample. Types with a head are first.
    kinds = [kind for kind in all_types() if _named(kind, options.only)]
    kinds.sort(key=lambda kind: (head_of(kind) is None, hashlib.sha256(kind.encode()).digest()))
    wanted = [kind for kind in kinds if options.again or kind not in rows or options.refused and _refused(rows[kind])]
    fork = multiprocessing.get_context("fork")
    running: dict[str, tuple[Any, float, Path]] = {}
    folder = Path(tempfile.mkdtemp())
    while wanted or running:
        while wanted and len(running) < options.jobs:
            kind = wanted.pop(0)
            path = folder / f"{kind}.json"
            worker = fork.Process(target=work, args=(kind, path))
            worker.start()
            running[kind] = (worker, time.monotonic(), path)
        time.sleep(0.2)
        for kind, (worker, start, path) in list(running.items()):
            late = time.monotonic() - start > LIMIT_S
            if worker.is_alive() and not late:
                continue
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGKILL)
            worker.join()
            row: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"train": ""}
            for mode in ("train", "decode"):
                if row.get(mode) == "":
                    row[mode] = f"not planned within {LIMIT_S} s" if late else f"ended with {worker.exitcode}"
            row["seconds"] = round(time.monotonic() - start, 1)
            del running[kind]
            rows = (json.loads(ROWS.read_text()) if ROWS.exists() else {}) | {kind: row}
            ROWS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
            print(f"{kind:32} {row['seconds']:6} {row['train'][:150]} | {row.get('decode', '-')[:80]}", flush=True)
    write_page(rows)


def _refused(row: dict[str, Any]) -> bool:
    return row["train"] != "works" or row.get("decode", "works") != "works"


def _named(kind: str, text: str) -> bool:
    return any(kind == each[1:] if each.startswith("=") else each in kind for each in text.split(","))


def _load() -> None:
    """Import everything that every worker needs, before the fork."""
    import jax  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import autoshard
    import autoshard.program.hf.hf_program
    from autoshard.program.torch_ops.torch_imports import importing_torchax

    torch.set_num_threads(1)
    with importing_torchax():
        import torchax  # noqa: F401
    _ = autoshard.plan
    from transformers.models.auto import modeling_auto  # noqa: F401


def all_types() -> list[str]:
    """List every model type of the installed transformers."""
    from transformers.models.auto import configuration_auto as auto

    return sorted(getattr(auto, "CONFIG_MAPPING_NAMES"))  # noqa: B009  # no stub exports it


def head_of(kind: str) -> str | None:
    """Return the class with a task head that is used for a model type; None if it has none."""
    from transformers.models.auto import modeling_auto as auto

    from autoshard.program.hf.hf_model import _HEADS

    for head in _HEADS[:-1]:
        text = getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}).get(kind)
        if text:
            return text if isinstance(text, str) else text[0]
    return None


def class_of(kind: str) -> str | None:
    """Return the class that is built from a configuration without `architectures`."""
    import autoshard
    from autoshard.program.hf.hf_model import _config_class, _model_class

    try:
        return _model_class(kind, kind, _config_class(kind, kind), None).__name__
    except autoshard.UserError:
        return head_of(kind)


def work(kind: str, path: Path) -> None:
    """Plan one type, and write each outcome to `path` at once."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY * 8, MEMORY * 8))
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    row: dict[str, Any] = {"head": head_of(kind) and class_of(kind), "train": ""}

    def keep() -> None:
        path.write_text(json.dumps(row))

    keep()
    name, problems = None, []
    for rung in range(3):
        name, said = attempt(kind, rung, path.parent, train=True)
        problems.append(said)
        if said == "works" or any(text in said for text in SURE):
            break
    row["train"] = "works" if said == "works" else problems[0] if "cannot be built" not in problems[0] else problems[-1]
    row["rung"] = rung
    keep()
    if _decodes(row["head"]):
        row["decode"] = ""
        keep()
        _, row["decode"] = attempt(kind, rung, path.parent, serve="decode")
        keep()


def _decodes(name: str | None) -> bool:
    return str(name).endswith(("ForCausalLM", "LMHeadModel", "ModelWithLMHead"))


def attempt(kind: str, rung: int, folder: Path, **mode: Any) -> tuple[Path, str]:
    """Plan a type at one rung; return the path of its configuration, and `works` or the error's text."""
    import autoshard
    from experiments.lib.programs.tiny_configs import tiny

    path = folder / f"{kind}-{rung}.config.json"
    try:
        path.write_text(json.dumps(tiny(kind, rung, _decodes(class_of(kind))), default=str))
    except Exception as error:
        said = (str(error).splitlines() or [""])[0][:200]
        return path, f"no default configuration: {type(error).__name__}: {said}"
    try:
        for seq in (SEQ, None):
            try:
                program = autoshard.program.open_source(f"hf:{path}", batch=BATCH, seq=seq, dtype="fp32", **mode)
                break
            except autoshard.UserError as error:
                if "--seq " not in str(error) or seq is None:  # a model without tokens, or with fewer positions
                    raise
        autoshard.plan(program, topology="v5e:2x2", mesh={"data": 4})
    except autoshard.UserError as error:
        text = str(error).replace(str(path), kind).replace(f"{kind}-{rung}.config", kind)
        if os.environ.get("TRACE"):
            traceback.print_exc(file=sys.stdout)
        return path, text
    except Exception as error:
        if os.environ.get("TRACE"):
            traceback.print_exc(file=sys.stdout)
        return path, f"{type(error).__name__}: {str(error)[:300]}"
    return path, "works"


def write_page(rows: dict[str, Any]) -> None:
    """Write the page of all types."""
    heads = {kind: row for kind, row in rows.items() if row.get("head")}
    works = sum(row["train"] == "works" for row in heads.values())
    decoders = [row for row in rows.values() if "decode" in row]
    decoding = sum(row["decode"] == "works" for row in decoders)
    everything = all_types()
    with_head = sum(head_of(kind) is not None for kind in everything)
    import transformers

    lines = [
        "# Models of transformers",
        "",
        f"What comes of `hf:CONFIG` for the model types of transformers {transformers.__version__}, each in a small "
        "form of its own configuration: a training step planned on v5e:2x2 with `data=4`, and a step of decoding where "
        "its class is a decoder. `experiments/models/models.py` makes this page.",
        "",
        f"{len(rows)} of its {len(everything)} model types were tried, in an order as good as random and those with a "
        f"task head first: {len(heads)} of the {with_head} that have one. {works} of these {len(heads)} are planned "
        f"for training ({_percent(works, len(heads))}); of the {len(decoders)} whose class is a decoder {decoding} are "
        f"planned for decoding ({_percent(decoding, len(decoders))}). What is refused says why; a type that is not "
        "listed was not tried, and is opened in the same way.",
        "",
        "| model type | class | training | decoding |",
        "| --- | --- | --- | --- |",
    ]
    for kind, row in sorted(rows.items()):
        cells = [f"`{kind}`", f"`{row['head']}`" if row.get("head") else "no task head", row["train"]]
        cells.append(row.get("decode", ""))
        lines.append(
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") for cell in cells) + " |"
        )
    PAGE.write_text("\n".join(lines) + "\n")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"


if __name__ == "__main__":
    main()
