"""Random torch modules, traced and compared with eager torch, counted by feature.

    python experiments/random_modules.py [--modules 300]

Each module of `tests/random_modules.py` becomes a training step. Loss, the gradient of every parameter, and buffers are
those of eager torch, and afterwards the module has the tensors, attributes, hooks and modes that it had and computes
the same; or else the table names the fewest features with which it fails. A module that is refused is counted apart,
never as equal. Every tenth is planned for 8 CPU devices too, and its step compared with the unplanned one.

Rows are kept in `results/random_modules.json` as they are made, and are not made again. Writes
`results/random_modules.md`; exit code 1 if anything was wrong.
"""

import sys
from pathlib import Path


ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "results" / "random_modules.md"
AT_ONCE = 20
"""Modules of one process: compiled programs stay in its memory."""
PLANNED = 10
sys.path.insert(0, str(ROOT))
