"""A Ray cluster as an executor of `concurrent.futures`: calls that know nothing of one another, on its nodes."""

import concurrent.futures
import contextlib
import importlib.util
import os
import pickle
import queue
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from autoshard.base.processes import python_command
from autoshard.base.ray_driver import ANSWER_S, GIVEN, NOTED, OWN
from autoshard.base.ray_node import setting_here
from autoshard.errors import UserError


RAY = "ray"
"""In place of an address: the Ray that is there, else one of our own."""
START_S = 120.0
"""Seconds that Ray gets to be imported, and to start on a machine that has much to do."""
CLIENT_S = 30.0
"""Seconds that `ray://` gets to take us in: it starts a process for us."""
LEAVE_S = 10.0
"""Seconds that are waited for the end of what was started."""


class RayPool(concurrent.futures.Executor):
    """Calls as tasks of the Ray cluster at `address`, one CPU each, at most `most` of them at a time.

    `address` is `HOST:PORT` of a cluster that this machine is part of, `ray://HOST:PORT` of any, or `ray`: what
    `RAY_ADDRESS` names, else the one that `ray start` has started on this machine, else a Ray of this machine alone,
    which ends with the pool. Tasks find the environment variables, the working directory and the packages of this
    process, or say so; `prepare` (`module:function`) is called once in each of their processes.

    Connecting begins at once, in a process of its own. Raises `UserError` if Ray is not installed.
    """

    def __init__(self, address: str = RAY, most: int | None = None, prepare: str | None = None) -> None:
        if not all(importlib.util.find_spec(name) for name in ("ray", "grpc")):
            raise UserError(f"--on {address} needs Ray, which is not installed: pip install 'autoshard[ray]'.")
        self._address, self._note, kind = _found(address)
        self._given, self._most, self._prepare = address, most, prepare
        self._process = subprocess.Popen(
            python_command("autoshard.base.ray_driver", self._address, kind, watched=False),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Ray's own opinions; what matters is said on stdout
            start_new_session=True,  # an interrupt of the terminal is ours to pass on
        )
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._number, self._ended, self._connected = 0, False, False
        self._said: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def connect(self) -> None:
        """Wait for the connection, once. Raises `UserError`, and ends everything, if it cannot be had."""
        if self._connected:
            return
        try:
            join = START_S if not self._address else CLIENT_S if "://" in self._address else ANSWER_S
            for step, seconds in (("reached", 2 * ANSWER_S), ("imported", START_S), ("joined", join)):
                try:
                    said, *why = self._said.get(timeout=seconds)
                except queue.Empty:
                    said, why = "refused", [f"no answer within {seconds:g} s"]
                if said != step:
                    raise UserError(self._refusal(*why))
            self._send((setting_here(self._prepare), self._most))
            self._connected = True
        except BaseException:
            self.shutdown()
            raise

    def _refusal(self, why: str = "it ended") -> str:
        if not self._address:
            return f"--on {self._given}: Ray cannot be started on this machine ({why})."
        hint = "."
        if self._note:
            hint = f"; {self._note} names it: correct that, or give --on HOST:PORT."
        elif "://" not in self._address:
            hint = "; on a machine that is no node of that cluster give ray://HOST:10001."
        if "no answer" in why and "RAY_AUTH_MODE" not in os.environ:
            hint = f"{hint[:-1]}; a cluster with tokens needs RAY_AUTH_MODE=token."
        return f"--on {self._given}: no Ray can be reached at {self._address} ({why}){hint}"

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """What the call comes to, once it has: call, arguments and result can be pickled.

        A call that raises has a `RuntimeError` of the same text as its outcome, or its `UserError`; one whose process
        or node dies, or whose result is lost with a node, a `BrokenExecutor`. Raises `RuntimeError` after `shutdown`
        and when the cluster is gone, and for arguments by keyword; `UserError` as `connect` does.
        """
        if kwargs:
            raise RuntimeError("arguments by keyword are not taken to another process")
        self.connect()
        data = pickle.dumps((fn, args), protocol=5)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._ended:
                raise RuntimeError("the connection to Ray has ended")
            self._number = number = self._number + 1
            self._waiting[number] = future
            future.set_running_or_notify_cancel()
        # Who listens sees the end too, and says so of every call. It must not wait for what is written here.
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._send((number, data))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Gives up all that runs, ends a Ray of our own, and with `wait` sees to it that nothing is left."""
        with self._lock:
            self._ended = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if wait:
            try:
                self._process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(wait=kind is None or issubclass(kind, Exception))  # else it clears up behind us

    def _send(self, message: object) -> None:
        into = self._process.stdin
        assert into is not None
        pickle.dump(message, into, protocol=5)
        into.flush()

    def _listen(self) -> None:
        source = self._process.stdout
        assert source is not None
        with source, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                match pickle.load(source):
                    case ("value" | "failed" | "lost" as kind, int(number), answer):
                        with self._lock:
                            future = self._waiting.pop(number)
                        _settle(future, kind, answer)
                    case message:
                        self._said.put(message)
        self._said.put(("ended",))
        with self._lock:
            self._ended = True
            left, self._waiting = self._waiting, {}
        for future in left.values():
            future.set_exception(concurrent.futures.BrokenExecutor("the connection to Ray has ended"))


def _settle(future: "concurrent.futures.Future[Any]", kind: str, answer: Any) -> None:
    """The outcome of a call from what the driver says of it."""
    if kind == "lost":
        return future.set_exception(concurrent.futures.BrokenExecutor(answer))
    try:
        done, value = (False, answer) if kind == "failed" else pickle.loads(answer)
    except Exception as error:
        done, value = False, f"what a node returned cannot be read: {error}"
    if done:
        return future.set_result(value)
    if isinstance(value, UserError):
        return future.set_exception(value)
    if kind == "failed" and "No module named 'autoshard" in value:
        value = f"autoshard must be installed on every Ray node, in the version that is here ({value})."
        return future.set_exception(UserError(value))
    return future.set_exception(RuntimeError(value))


def _found(given: str) -> tuple[str, str, str]:
    """Address, who names it if not the user, and its kind; an empty address for a Ray of our own."""
    if given != RAY:
        return given, "", GIVEN
    if named := os.environ.get("RAY_ADDRESS", "").strip():
        return ("", "", OWN) if named == "local" else (named, "RAY_ADDRESS", GIVEN)
    place = next(filter(None, (os.environ.get(name) for name in ("RAY_TMPDIR", "TMPDIR"))), "/tmp")
    noted = Path(place) / "ray" / "ray_current_cluster"  # where `ray start` leaves it, and `ray stop` takes it away
    with contextlib.suppress(OSError):
        if address := noted.read_text().strip():
            return address, str(noted), NOTED
    return "", "", OWN
