"""Driver process of a `RayPool`: it owns the connection to Ray, reads calls from stdin and writes results to stdout.

The connection has its own process for three reasons. Ray may wait for minutes for an absent cluster. Ray prints, and
replaces signal handlers. Ray ends its process when it loses the cluster. The pool abandons any request by closing the
driver's stdin: the driver then ends a Ray that it started, and exits.
"""

import concurrent.futures
import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
from typing import Any

from autoshard.base.processes import when_stdin_ends
from autoshard.base.ray_node import NodeSetting, run_call
from autoshard.base.worker import Parent, pickled


OWN, NOTED, GIVEN = "own", "noted", "given"
"""Kinds of cluster: a Ray that the driver starts, one that `ray start` noted on this machine, one at an address."""
ANSWER_S = 10.0
"""Seconds within which an address must answer."""
LEAVE_S = 30.0
"""Seconds within which Ray must end the processes that it started, including a Ray that is still starting."""


class _Driver:
    """State of the driver process: its pipes to the pool and its connection to Ray."""

    def __init__(self) -> None:
        self.parent = Parent()
        self.ray: Any = None
        self.begun = False
        """True if Ray may have processes or tasks to clean up."""

    def say(self, *message: object) -> None:
        """Send a message, a tuple whose first element is its kind, to the pool."""
        self.parent.send(pickled(message))

    def leave(self) -> None:
        """Cancel all tasks, end a Ray that this driver started, and exit this process within `LEAVE_S`."""
        if self.begun:
            signal.setitimer(signal.ITIMER_REAL, LEAVE_S)  # the signal's default ends the process
            with contextlib.suppress(Exception):
                self.ray.shutdown()
        os._exit(0)

    def connect(self, address: str, kind: str) -> None:
        """Connect to the cluster, or start one, and report each step: `reached`, `imported` and `joined`.

        `reached` means that the address accepts TCP connections; for `OWN` nothing is checked. A `ray://` address
        must then answer gRPC too, unless `RAY_USE_TLS` is set: Ray may then retry for ever.

        Raises `OSError` if the address is silent, `ValueError` if it has no port, and any error of Ray.

        - `kind`: one of `OWN`, `NOTED` and `GIVEN`; the address is empty for `OWN`.
        """
        if kind != OWN:
            _reach(address)
        self.say("reached")
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        import logging

        import ray

        self.ray = ray
        self.say("imported")
        if address.startswith("ray://") and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            _hear(address)
        self.begun = kind == OWN
        ray.init(
            {OWN: "local", NOTED: None, GIVEN: address}[kind],
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
        self.begun = True
        self.say("joined")

    def serve(self, setting: NodeSetting, most: int | None) -> None:
        """Run calls from stdin as Ray tasks, at most `most` at a time, until stdin ends.

        Each call is a pair of number and data. Report its outcome with the number, in the order in which tasks end:
        `value`, `failed` if the call raised, `lost` if its process died. The last two carry one line of text. Ray
        does not retry lost tasks (`max_retries=0`): the pool's caller receives the error and decides. Raises
        `EOFError` when stdin ends.

        - `setting`: environment that the nodes adopt.
        - `most`: None for no limit.
        """
        task = self.ray.remote(num_cpus=1, max_retries=0)(run_call)
        shared = self.ray.put(setting)
        free = threading.Semaphore(most or sys.maxsize)
        running: dict[int, Any] = {}

        def ended(number: int, future: "concurrent.futures.Future[bytes]") -> None:
            """Report the outcome of a task: `value`, `failed` if the task raised, `lost` if its process died."""
            del running[number]
            free.release()  # first, since `say` below may block until the pool has sent more calls
            error = future.exception()
            if error is None:
                self.say("value", number, future.result())
            else:
                wrong = isinstance(error, self.ray.exceptions.RayTaskError)
                self.say("failed" if wrong else "lost", number, _line(error))

        while True:
            number, data = self.parent.receive()
            free.acquire()
            running[number] = reference = task.remote(shared, data)
            reference.future().add_done_callback(lambda future, number=number: ended(number, future))


def main(address: str, kind: str) -> None:
    """Connect to Ray, report each step, then run calls until stdin ends.

    The first message on stdin carries the pickled arguments of `_Driver.serve`; all later ones are calls. After any
    error, also one while calls run, report `refused` with one line of text, and exit.
    """
    driver = _Driver()
    when_stdin_ends(driver.leave)
    try:
        driver.connect(address, kind)
        driver.serve(*pickle.loads(driver.parent.receive()[1]))
    except EOFError:
        threading.Event().wait()  # the thread of `when_stdin_ends` ends the process
    except Exception as error:
        driver.say("refused", _line(error))
        driver.leave()


def _place(address: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `ray://HOST:PORT`, the host without the brackets of IPv6. Raises
    `ValueError` if the port is missing or no number.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return host.strip("[]"), int(port)


def _reach(address: str) -> None:
    """Check that a server listens at the address; raise `OSError` if none does within `ANSWER_S`."""
    try:
        socket.create_connection(_place(address), ANSWER_S).close()
    except OSError as error:
        raise OSError(error.strerror or f"no answer within {ANSWER_S:g} s") from None


def _hear(address: str) -> None:
    """Check that a gRPC server answers at a `ray://` address; raise `OSError` if none does within `ANSWER_S`.

    A Ray client would retry for ever.
    """
    import grpc

    with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc.FutureTimeoutError:
            raise OSError(f"no answer within {ANSWER_S:g} s") from None


def _line(error: BaseException) -> str:
    """Return an error's text as one line of at most 300 characters, or its type if it has no text.

    It is the last line of a traceback, else the first line, which is Ray's explanation.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "Traceback" in str(error) or lines[0].startswith("ray::") else 0][:300]
