"""The process that holds the connection to Ray: calls come in on its stdin, what they came to goes out on its stdout.

A process of its own, since Ray may wait for minutes for what is not there, prints what it thinks, takes signal handlers
for itself, and ends the process that it is in when it has lost its cluster. Whatever this one is asked for can be given
up by closing its stdin: it ends a Ray that it started, and itself.
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


OWN, NOTED, GIVEN = "own", "noted", "given"
"""A Ray of our own; that which `ray start` noted on this machine; one at an address."""
ANSWER_S = 10.0
"""Seconds in which an address must answer."""
LEAVE_S = 30.0
"""Seconds that Ray gets to end what it started, also if it is only starting."""


class _Driver:
    def __init__(self) -> None:
        self.sink = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # whatever libraries print goes to stderr
        self.lock = threading.Lock()
        self.ray: Any = None
        self.begun = False
        """Whether Ray may have something to clear up."""

    def say(self, *message: object) -> None:
        with self.lock, contextlib.suppress(OSError):
            pickle.dump(message, self.sink, protocol=5)
            self.sink.flush()

    def leave(self) -> None:
        """What is begun on Ray is given up, a Ray of our own is ended, and this process with it."""
        if self.begun:
            signal.setitimer(signal.ITIMER_REAL, LEAVE_S)  # the signal's default ends the process
            with contextlib.suppress(Exception):
                self.ray.shutdown()
        os._exit(0)

    def connect(self, address: str, kind: str) -> None:
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
        """Calls until there are no more, at most so many of them at a time.

        Ray does not make lost ones again itself (`max_retries`): whoever asked is told, and decides.
        """
        task = self.ray.remote(num_cpus=1, max_retries=0)(run_call)
        shared = self.ray.put(setting)
        free = threading.Semaphore(most or sys.maxsize)
        running: dict[int, Any] = {}

        def ended(number: int, future: "concurrent.futures.Future[bytes]") -> None:
            del running[number]
            free.release()  # before what follows, which may have to wait until more calls have come in
            error = future.exception()
            if error is None:
                self.say("value", number, future.result())
            else:
                wrong = isinstance(error, self.ray.exceptions.RayTaskError)
                self.say("failed" if wrong else "lost", number, _line(error))

        while True:
            number, data = pickle.load(sys.stdin.buffer)
            free.acquire()
            running[number] = reference = task.remote(shared, data)
            reference.future().add_done_callback(lambda future, number=number: ended(number, future))


def main(address: str, kind: str) -> None:
    """Connect, say how it went step by step, and do what comes in until stdin ends."""
    driver = _Driver()
    when_stdin_ends(driver.leave)
    try:
        driver.connect(address, kind)
        driver.serve(*pickle.load(sys.stdin.buffer))
    except EOFError:
        threading.Event().wait()  # the other thread ends all
    except Exception as error:
        driver.say("refused", _line(error))
        driver.leave()


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return host.strip("[]"), int(port)


def _reach(address: str) -> None:
    """Raises `OSError` if nothing listens there."""
    try:
        socket.create_connection(_place(address), ANSWER_S).close()
    except OSError as error:
        raise OSError(error.strerror or f"no answer within {ANSWER_S:g} s") from None


def _hear(address: str) -> None:
    """Raises `OSError` if what listens there is no server of Ray's kind: a client of Ray would go on asking."""
    import grpc

    with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc.FutureTimeoutError:
            raise OSError(f"no answer within {ANSWER_S:g} s") from None


def _line(error: BaseException) -> str:
    """An error in a line: the last of a traceback, the first of Ray's own explanations."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "Traceback" in str(error) or lines[0].startswith("ray::") else 0][:300]
