"""Timed steps on CPU devices meet memory that is there already."""

import ctypes
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from autoshard.exec._kept_memory import _glibc, memory_kept
from autoshard.exec._steps import run_in_turn


SIZE = 40 << 20
"""Above every threshold from which glibc maps memory anew, and within one thread's own heap."""
needs_glibc = pytest.mark.skipif(_glibc() is None, reason="another C library than glibc")


def fresh_pages() -> int:
    """Pages that the system had to give while `SIZE` bytes were allocated, written and freed."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(SIZE)
    ctypes.memset(block, 1, SIZE)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class Step:
    """Stands for a step on a device, which is a thread: its "time" is the fresh pages of its temporaries."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool

    def run(self) -> tuple[float, list[Any]]:
        return float(self.pool.submit(fresh_pages).result()), []


@needs_glibc
def test_steps_that_are_timed_meet_memory_that_is_there_already() -> None:
    with ThreadPoolExecutor(1) as device:
        usual = [Step(device).run()[0] for _ in range(4)]
        timed = run_in_turn({"a": Step(device), "b": Step(device)}, rounds=3)  # type: ignore[dict-item]
        later = [Step(device).run()[0] for _ in range(2)]
    assert min(usual) > 10, "the system gives every step fresh pages, some of them large ones"
    assert max(timed["a"] + timed["b"]) < min(usual) / 4
    assert min(later) > 10, "afterwards memory goes back again"


@needs_glibc
def test_memory_goes_back_when_the_body_fails() -> None:
    with pytest.raises(ZeroDivisionError), memory_kept():
        fresh_pages()
        assert fresh_pages() < 10
        raise ZeroDivisionError
    assert fresh_pages() > 10
