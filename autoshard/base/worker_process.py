"""Helper processes that run jobs, and the protocol between them and the process that starts them.

A helper starts by `subprocess`, never by a fork, since JAX and compiled kernels do not survive one. It imports only the
modules that its jobs name, never the user's `__main__`. Jobs and answers are pickled over its pipes. An object that
many jobs refer to is shared once, under a name, and that name replaces it in pickles.
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
    """One call. The call, its arguments and its result must be picklable, except for shared objects."""

    key: Hashable
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    stoppable: bool = False
    """True if the call has a parameter `stop`, an event, and raises `Stopped` soon after it is set."""


class Stopped(Exception):
    """Early end of a job whose result is no longer needed."""


@dataclasses.dataclass(slots=True)
class Shared:
    """Object that jobs and answers refer to by its name."""

    name: str
    thing: object
    sent: object
    """Object that helpers receive in place of `thing`; None once it has been pickled."""
    data: bytes | None = None
    """Pickled message that gives a helper the name and the object."""


class _Pickler(pickle.Pickler):
    """Pickler that writes names in place of shared objects."""

    def __init__(self, file: IO[bytes], names: dict[int, str]) -> None:
        super().__init__(file, protocol=5)
        self._names = names

    def persistent_id(self, obj: object) -> str | None:
        """Return the name of a shared object; None for any other object."""
        return self._names.get(id(obj))


def pickled(message: object, names: dict[int, str]) -> bytes:
    """Serialise a message; `names` maps the `id` of each shared object to its name."""
    file = io.BytesIO()
    _Pickler(file, names).dump(message)
    return file.getvalue()


class _Unpickler(pickle.Unpickler):
    """Unpickler that replaces names by shared objects."""

    def __init__(self, file: IO[bytes], things: dict[str, object]) -> None:
        super().__init__(file)
        self._things = things

    def persistent_load(self, pid: str) -> object:
        """Return the shared object of this name."""
        return self._things[pid]


class Helper:
    """Handle of one helper process, for the process that started it."""

    def __init__(self, prepare: str | None) -> None:
        self._process = start_python(__name__, *([prepare] if prepare else []))
        self._speaking = threading.Lock()
        self._things: dict[str, object] = {}
        self.number = 0
        """Number of the current job; changes only before that job is sent."""
        self._ended = False

    def call(self, job: Job, shared: Sequence[Shared]) -> tuple[Any, float]:
        """Run a job in the helper and return its result and the processor seconds that it used.

        Shared objects that the helper lacks are sent first, and those no longer in `shared` are dropped. Raises the
        call's own `UserError`, or a `RuntimeError` with the text of any other `Exception`, also if the helper has
        ended.
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
        """Send the message that the current job's result is no longer needed."""
        with contextlib.suppress(OSError, ValueError):
            self._send(pickled(self.number, {}))

    def _send(self, message: bytes) -> None:
        """Write a message to the helper's stdin."""
        into = self._process.stdin
        assert into is not None
        with self._speaking:
            into.write(message)
            into.flush()

    @property
    def alive(self) -> bool:
        """True if the process is running."""
        return not self._ended and self._process.poll() is None

    def _how_it_ended(self) -> str:
        """Return a clause that explains the end of the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return f"it was ended by signal {-code}" if code < 0 else f"it ended with code {code}"
        return "its pipe is closed"

    def end(self) -> None:
        """End the process with SIGKILL and close its pipes."""
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
    """Run as a helper: execute the jobs that arrive on stdin, and exit when stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles the interrupt and ends its helpers
    collect_seldom()
    # Output that libraries print goes to stderr.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    things: dict[str, object] = {}
    inbox: queue.SimpleQueue[_Given] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(things, inbox), daemon=True).start()
    if prepare:
        module, _, function = prepare.partition(":")
        getattr(importlib.import_module(module), function)()
    while True:
        job = inbox.get()
        began = processor_seconds()
        try:
            value = job.call(*job.arguments, **({"stop": job.stop} if job.stoppable else {}))
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
    """Job as a helper process receives it."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    stoppable: bool
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)


def _listen(things: dict[str, object], inbox: "queue.SimpleQueue[_Given]") -> None:
    """Read messages from stdin: shared objects, jobs, and requests to stop one. Exit the process when stdin ends."""
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
        # A message is a number (stop that job), a name (drop that object), a pair (share an object), or four values (a
        # job).
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
                if stopped == number:  # the stop arrived before the job
                    newest.stop.set()
                inbox.put(newest)
