"""Executor of `concurrent.futures` that runs independent calls on the nodes of a Ray cluster."""

import concurrent.futures
import contextlib
import importlib.util
import os
import pickle
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL
from types import TracebackType
from typing import Any

from autoshard.base.ray_driver import ANSWER_S, GIVEN, NOTED, OWN
from autoshard.base.ray_node import setting_here
from autoshard.base.worker import Child, pickled
from autoshard.errors import UserError


RAY = "ray"
"""Value in place of an address: use a running Ray cluster, else start one."""
START_S = 120.0
"""Seconds within which Ray must be imported, and must start on a busy machine."""
CLIENT_S = 30.0
"""Seconds within which a `ray://` server must accept the connection; it starts a process for each client."""
LEAVE_S = 10.0
"""Seconds to wait for the driver process to end."""


class RayPool(concurrent.futures.Executor):
    """Executor that runs calls as tasks of a Ray cluster, one CPU each.

    - `address`: `HOST:PORT` of a cluster that this machine is part of, `ray://HOST:PORT` of any other, or `ray`. For
      `ray` the pool uses `RAY_ADDRESS`, else the cluster that `ray start` noted on this machine. Without either it
      starts a Ray on this machine, which ends with the pool.
    - `most`: most tasks that run at once; None for no limit.
    - `prepare`: `module:function` that every worker process calls once, before its first task; None for none.

    Tasks run with this process's environment variables and working directory. A task fails with a message if a node's
    packages differ. The constructor begins to connect, in a separate process. Raises `UserError` if Ray is not
    installed.
    """

    def __init__(self, address: str = RAY, most: int | None = None, prepare: str | None = None) -> None:
        if not all(importlib.util.find_spec(name) for name in ("ray", "grpc")):
            raise UserError(f"--on {address} needs Ray, which is not installed: pip install 'autoshard[ray]'.")
        self._address, self._note, kind = _found(address)
        self._given, self._most, self._prepare = address, most, prepare
        self._driver = Child(
            "autoshard.base.ray_driver",
            self._address,
            kind,
            environment=os.environ,
            stderr=DEVNULL,  # Ray's log; the driver reports what matters on stdout
            session=True,  # an interrupt from the terminal must not reach the driver directly
            watched=False,
        )
        self._lock = threading.Lock()
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._number, self._ended, self._connected = 0, False, False
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def connect(self) -> None:
        """Wait until the pool is connected. Raises `UserError`, and ends the pool, if that fails."""
        if self._connected:
            return
        try:
            join = START_S if not self._address else CLIENT_S if "://" in self._address else ANSWER_S
            # The driver reports each of these steps; the first report may take two timeouts of `ANSWER_S`.
            for step, seconds in (("reached", 2 * ANSWER_S), ("imported", START_S), ("joined", join)):
                try:
                    answer, *why = self._messages.get(timeout=seconds)
                except queue.Empty:
                    answer, why = "refused", [f"no answer within {seconds:g} s"]
                if answer != step:
                    raise UserError(self._refusal(*why))
            self._driver.send(pickled((setting_here(self._prepare), self._most)))
            self._connected = True
        except BaseException:
            self.shutdown()
            raise

    def _refusal(self, why: str = "it ended") -> str:
        """Return the error message for a failed connection, with the reason `why` and a hint to correct the address."""
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
        """Schedule a call and return the future of its result. Call, arguments and result must be picklable.

        The future counts as running at once, so that it cannot be cancelled. Its error is the call's own `UserError`,
        or a `RuntimeError` with the text of any other exception. It is a `BrokenExecutor` if the worker process or its
        node dies, or if the result is lost with a node.

        Raises `RuntimeError` after `shutdown`, when the cluster is gone, and for keyword arguments. Raises `UserError`
        as `connect` does.
        """
        if kwargs:
            raise RuntimeError("keyword arguments cannot be sent to another process")
        self.connect()
        data = pickle.dumps((fn, args), protocol=5)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._ended:
                raise RuntimeError("the connection to Ray has ended")
            self._number = number = self._number + 1
            self._waiting[number] = future
            future.set_running_or_notify_cancel()
        # A failed write needs no handling: the listener thread sees the end of the driver and fails every future.
        with contextlib.suppress(OSError, ValueError):
            self._driver.send(data, number)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Cancel all calls, running ones too, and end a Ray that the pool started; `cancel_futures` changes nothing.

        Unresolved futures get a `BrokenExecutor`. With `wait`, wait up to `LEAVE_S` for the driver process, then kill
        it.
        """
        with self._lock:
            self._ended = True
        self._driver.hang_up()
        if wait:
            self._driver.end(LEAVE_S)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call `shutdown`, which waits for the driver process unless an interrupt ended the block."""
        # After an interrupt the driver cleans up without this process.
        self.shutdown(wait=kind is None or issubclass(kind, Exception))

    def _listen(self) -> None:
        """Read the driver's messages until it ends: resolve futures, and queue other messages for `connect`.

        At the end fail the futures left with `BrokenExecutor`.
        """
        with contextlib.suppress(EOFError, OSError, ValueError):
            while True:
                match pickle.loads(self._driver.receive()[1]):
                    case ("value" | "failed" | "lost" as kind, int(number), answer):
                        with self._lock:
                            future = self._waiting.pop(number)
                        _settle(future, kind, answer)
                    case message:
                        self._messages.put(message)
        self._messages.put(("ended",))
        with self._lock:
            self._ended = True
            unresolved, self._waiting = self._waiting, {}
        for future in unresolved.values():
            future.set_exception(concurrent.futures.BrokenExecutor("the connection to Ray has ended"))


def _settle(future: "concurrent.futures.Future[Any]", kind: str, answer: Any) -> None:
    """Set the result or the error of a future from the driver's answer, as `RayPool.submit` describes.

    A node without autoshard becomes a `UserError`, and a result that cannot be unpickled a `RuntimeError`.

    - `kind`: `value` if the task returned, `failed` if it raised, `lost` if its process or node died.
    - `answer`: pickled pair (success, value) for `value`, else the text of the error.
    """
    if kind == "lost":
        return future.set_exception(concurrent.futures.BrokenExecutor(answer))
    try:
        done, value = (False, answer) if kind == "failed" else pickle.loads(answer)
    except Exception as error:
        done, value = False, f"the result of a node cannot be read: {error}"
    if done:
        return future.set_result(value)
    if isinstance(value, UserError):
        return future.set_exception(value)
    if kind == "failed" and "No module named 'autoshard" in value:
        value = f"autoshard must be installed on every Ray node, in the version that is here ({value})."
        return future.set_exception(UserError(value))
    return future.set_exception(RuntimeError(value))


def _found(given: str) -> tuple[str, str, str]:
    """Return the cluster's address (empty for `OWN`), the source that names it if not the user, and its kind."""
    if given != RAY:
        return given, "", GIVEN
    if configured := os.environ.get("RAY_ADDRESS", "").strip():
        return ("", "", OWN) if configured == "local" else (configured, "RAY_ADDRESS", GIVEN)
    place = next(filter(None, (os.environ.get(name) for name in ("RAY_TMPDIR", "TMPDIR"))), "/tmp")
    note_file = Path(place) / "ray" / "ray_current_cluster"  # `ray start` writes this file, `ray stop` deletes it
    with contextlib.suppress(OSError):
        if address := note_file.read_text().strip():
            return address, str(note_file), NOTED
    return "", "", OWN
