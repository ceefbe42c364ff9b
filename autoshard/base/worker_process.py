"""Helpers of a crew: processes that do jobs, and what is said to them and back.

A helper is started with `subprocess`, never by a fork (JAX and compiled kernels do not survive one), and imports only
what its jobs name, never the user's `__main__`. Jobs and answers are pickled over its pipes. What all jobs refer to is
shared once, by name, and stands in a pickle as that name.
"""

import contextlib
import dataclasses
import importlib
import io
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import IO, Any

from autoshard.base.processes import collect_seldom, processor_seconds, start_python
from autoshard.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One call. It and what it returns can be pickled, but for what is shared."""

    key: Hashable
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    stoppable: bool = False
    """Whether the call takes an event as `stop`, and raises `Stopped` soon after it is set."""


class Stopped(Exception):
    """A job was ended early, since nobody needs what it would come to."""


@dataclasses.dataclass(slots=True)
class Shared:
    """What stands in jobs and answers by its name."""

    name: str
    thing: object
    sent: object
    """What helpers are given in its place; None once it has been pickled."""
    data: bytes | None = None
    """The message that tells a helper of it."""


class _Pickler(pickle.Pickler):
    """Writes names for what is shared."""

    def __init__(self, file: IO[bytes], names: dict[int, str]) -> None:
        super().__init__(file, protocol=5)
        self._names = names

    def persistent_id(self, obj: object) -> str | None:
        return self._names.get(id(obj))


def pickled(message: object, names: dict[int, str]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, names).dump(message)
    return file.getvalue()


class _Unpickler(pickle.Unpickler):
    """Finds what is shared by its name."""

    def __init__(self, file: IO[bytes], things: dict[str, object]) -> None:
        super().__init__(file)
        self._things = things

    def persistent_load(self, pid: str) -> object:
        return self._things[pid]


class Helper:
    """One helper as this process sees it."""

    def __init__(self, prepare: str | None) -> None:
        self._process = start_python(__name__, *([prepare] if prepare else []))
        self._speaking = threading.Lock()
        self._things: dict[str, object] = {}
        self.number = 0
        """Of its present job; changed only before that is told of."""
        self._ended = False

    def call(self, job: Job, shared: Sequence[Shared]) -> tuple[Any, float]:
        """What it answers, waited for, and the seconds of processor it took. Raises any `Exception` if it fails.

        A `UserError` of the call comes as it is, any other as a `RuntimeError` of its text.
        """
        source = self._process.stdout
        assert source is not None
        try:
            for name in self._things.keys() - {each.name for each in shared}:
                self._send(pickled(name, {}))
                del self._things[name]
            for each in shared:
                if self._things.get(each.name) is not each.thing:
                    self._send(each.data or b"")
                    self._things[each.name] = each.thing
            names = {id(thing): name for name, thing in self._things.items()}
            self._send(pickled((self.number, job.call, job.arguments, job.stoppable), names))
            done, value, seconds = _Unpickler(source, self._things).load()
        except (OSError, EOFError, ValueError) as error:
            raise RuntimeError(self._how_it_ended()) from error
        if not done:
            raise value if isinstance(value, UserError) else RuntimeError(value)
        return value, seconds

    def stop(self) -> None:
        """Says that its present job is of no use any more."""
        with contextlib.suppress(OSError, ValueError):
            self._send(pickled(self.number, {}))

    def _send(self, message: bytes) -> None:
        into = self._process.stdin
        assert into is not None
        with self._speaking:
            into.write(message)
            into.flush()

    @property
    def alive(self) -> bool:
        """Whether the process goes on."""
        return not self._ended and self._process.poll() is None

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return f"it was ended by signal {-code}" if code < 0 else f"it ended with code {code}"
        return "its pipe is closed"

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()


def main(prepare: str | None = None) -> None:
    """A helper: does what comes in on its stdin, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it is interrupted, and ends it
    collect_seldom()
    # Whatever libraries print goes to stderr.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    things: dict[str, object] = {}
    inbox: queue.SimpleQueue[_Given] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(things, inbox), daemon=True).start()
    if prepare:
        module, _, function = prepare.partition(":")
        getattr(importlib.import_module(module), function)()
    while True:
        given = inbox.get()
        began = processor_seconds()
        try:
            value = given.call(*given.arguments, **({"stop": given.stop} if given.stoppable else {}))
            answer = True, value
        except Stopped as stopped:
            answer = True, stopped
        except UserError as error:
            answer = False, UserError(str(error))
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        names = {id(thing): name for name, thing in things.items()}
        try:
            sink.write(pickled((*answer, processor_seconds() - began), names))
            sink.flush()
        except BrokenPipeError:
            os._exit(0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """A job as a helper has it."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    stoppable: bool
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)


def _listen(things: dict[str, object], inbox: "queue.SimpleQueue[_Given]") -> None:
    """Takes in what is shared, what is to be done and what is not any more; ends the process with its stdin."""
    newest, stopped = _Given(print, (), False), 0
    number = 0
    while True:
        try:
            message = _Unpickler(sys.stdin.buffer, things).load()
        except EOFError:
            os._exit(0)
        except Exception as error:
            print(f"autoshard: a helper process cannot read its work: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        match message:
            case int(stopped):
                if stopped == number:
                    newest.stop.set()
            case str(name):
                del things[name]
            case (str(name), thing):
                things[name] = thing
            case (int(number), call, arguments, stoppable):
                newest = _Given(call, arguments, stoppable)
                if stopped == number:  # before it began
                    newest.stop.set()
                inbox.put(newest)
