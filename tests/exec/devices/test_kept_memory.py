"""Reuse of memory in timed steps on CPU devices: the allocator does not return freed pages to the system."""

import contextlib
import ctypes
import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

from autoshard.exec.devices.local_devices import _glibc, retained_memory
from autoshard.exec.run.planned_steps import run_in_turn


SIZE = 40 << 20
"""Bytes above every threshold from which glibc maps new memory, and within one thread's own heap."""
needs_glibc = pytest.mark.skipif(_glibc() is None, reason="another C library than glibc")


def fresh_pages() -> int:
    """Return the page faults of allocating, writing and freeing `SIZE` bytes."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(SIZE)
    ctypes.memset(block, 1, SIZE)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class Step:
    """Stand-in for a step on a device, which is a thread. Its "time" is the number of fresh pages of temporaries."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool

    def run(self) -> tuple[float, list[Any]]:
        return float(self.pool.submit(fresh_pages).result()), []


def pages_of_steps() -> tuple[list[float], dict[str, list[float]]]:
    """Return the fresh pages of ordinary steps, and of two steps that are timed in turn."""
    with ThreadPoolExecutor(1) as device:
        usual = [Step(device).run()[0] for _ in range(4)]
        return usual, run_in_turn({"a": Step(device), "b": Step(device)}, rounds=3)  # type: ignore[dict-item]


def pages_after_failure() -> tuple[int, int]:
    """Return the fresh pages inside of `retained_memory`, and after its body has failed."""
    with contextlib.suppress(ZeroDivisionError), retained_memory():
        fresh_pages()
        kept = fresh_pages()
        raise ZeroDivisionError
    return kept, fresh_pages()


def in_a_process_of_its_own(body: Callable[[], Any]) -> Any:
    """Run in a new process, in which other tests left nothing to the allocator."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(body).result()


@needs_glibc
def test_steps_that_are_timed_meet_memory_that_is_there_already() -> None:
    usual, timed = in_a_process_of_its_own(pages_of_steps)
    assert min(usual) > 10, "the system gives every step fresh pages, some of them large ones"
    assert max(timed["a"] + timed["b"]) < min(usual) / 4


@needs_glibc
def test_memory_goes_back_when_the_body_fails() -> None:
    kept, later = in_a_process_of_its_own(pages_after_failure)
    assert kept < 10 < later
