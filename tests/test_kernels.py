"""Kernels are cached if a cache directory is writable, and compiled otherwise as well."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.base.numba_jit import njit


ROOT = Path(__file__).parent.parent

WITHOUT_A_PLACE = """
import numba
import numba.core.caching as caching

def refuse(self):
    raise OSError(30, "Read-only file system")

caching._CacheLocator.ensure_cache_path = refuse
"""

ALL_KERNELS = """
import autoshard.planning.xla.transition_kernels, autoshard.solver.search.block_kernels
import autoshard.solver.search.message_kernels
import numpy as np
from autoshard.solver.dominance_kernels import fold_between

left, right = np.array([[5, 1], [2, 9]], dtype=np.int64), np.array([[0, 7], [1, 1]], dtype=np.int64)
print(fold_between(left, right)[0].tolist())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_A_PLACE + code], capture_output=True, text=True)


@pytest.mark.heavy
def test_numba_itself_refuses_to_cache_where_nothing_can_be_written() -> None:
    done = run("import fractions\nnumba.njit(cache=True)(fractions.Fraction.__add__)")
    assert done.returncode == 1 and "no locator available" in done.stderr


@pytest.mark.heavy
def test_kernels_are_compiled_where_nothing_can_be_written() -> None:
    done = run(ALL_KERNELS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[3, 3], [1, 8]]\n"


def test_other_refusals_of_numba_are_not_hidden() -> None:
    with pytest.raises(TypeError):
        njit(cache=True, nothing_like_it=True)(abs)


KEPT = """
from autoshard.base.numba_jit import njit

@njit(cache=True)
def double(x):
    return 2 * x

print(double(4))
"""


@pytest.mark.heavy
def test_what_an_older_version_has_preserved_is_compiled_again(tmp_path: Path) -> None:
    """Load a cache index of an older version, which contains a type that has been renamed."""
    script = tmp_path / "script.py"
    script.write_text(KEPT)

    def doubled() -> str:
        env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=env).stdout

    assert doubled() == "8\n"
    (index,) = tmp_path.rglob("*.nbi")
    version = pickle.dumps(pickle.loads(index.read_bytes()))
    index.write_bytes(version + b"cautoshard.kernels\nNotThereAnyMore\n.")
    assert doubled() == "8\n"
    assert b"NotThereAnyMore" not in index.read_bytes()
