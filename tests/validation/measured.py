"""Groups of measured plans in the format of their file."""

import json
import pathlib
from typing import Any


MODEL = {
    "family": "llama2", "layers": 2, "emb": 256, "mlp": 512, "heads": 2, "kv_heads": 2, "head_dim": 128,
    "vocab": 1024,
}  # fmt: skip


def group(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "group": "small", "source": "a/b@0:c.md", "model": MODEL, "hardware": "TPU v5p", "chips": 4,
        "topology": "2x2x1 (no wrap)", "kind": "plan",
        "fixed": {"seq": 256, "per_device_batch": 1, "remat": "full", "attention": "splash"},
        "rows": list(rows),
    } | changes  # fmt: skip


def write(folder: pathlib.Path, *groups: Any) -> pathlib.Path:
    file = folder / "pairs.json"
    file.write_text(json.dumps(list(groups)))
    return file
