"""Child processes, and the one protocol between them and the process that starts them.

A child starts by `subprocess`, never by a fork, since JAX and compiled kernels do not survive one. It imports only the
modules that its messages name, never the user's `__main__`. Its pipes carry messages, and it ends with its stdin.

A `Worker` is a child that runs jobs. An object that many jobs refer to is shared once, under a name, and that name
replaces it in pickles.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import IO, Any

from autoshard.base.processes import (
    collect_seldom,
    count_ended,
    count_living,
    processor_seconds,
    python_command,
    temporary_folder,
)
from autoshard.errors import UserError


GROUP_S = 5.0
"""Seconds within which the killed processes of a session must disappear."""
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One call. The call, its arguments and its result must be picklable, except for shared objects."""

    key: Hashable
    """Name of the job for the code that created it; the worker ignores it."""
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    stoppable: bool = False
    """True if the call has a parameter `stop`, an event. Soon after it is set, the call raises `Stopped` or returns the
    result so far.
    """
    number: int = dataclasses.field(default_factory=_numbers.__next__, compare=False)
    """Number of the job in this process, by which it is stopped."""


class Stopped(Exception):
    """Early end of a job whose result is no longer needed."""


class WorkerEnded(RuntimeError):
    """End of a worker's process during a job.

    - `how`: predicate that explains the end, such as "ended with code 1".
    """

    def __init__(self, how: str) -> None:
        super().__init__(f"it {how}")
        self.how = how


@dataclasses.dataclass(slots=True)
class Shared:
    """Object that jobs and answers refer to by its name."""

    name: str
    thing: object
    """The object in this process."""
    sent: object
    """Object that workers receive in place of `thing`; None once `data` replaces it."""
    data: bytes | None = None
    """Pickled message that gives a worker the name and the object; None to pickle it for each worker."""


class _Pickler(pickle.Pickler):
    """Pickler that writes names in place of shared objects."""

    def __init__(self, file: IO[bytes], names: Mapping[int, str]) -> None:
        super().__init__(file, protocol=5)
        self._names = names

    def persistent_id(self, obj: object) -> str | None:
        """Return the name of a shared object; None for any other object."""
        return self._names.get(id(obj))


def pickled(message: object, names: Mapping[int, str] | None = None) -> bytes:
    """Return a message as a pickle; `names` maps the `id` of each shared object to the name that replaces it."""
    if not names:
        return pickle.dumps(message, protocol=5)
    file = io.BytesIO()
    _Pickler(file, names).dump(message)
    return file.getvalue()


class _Unpickler(pickle.Unpickler):
    """Unpickler that replaces names by shared objects."""

    def __init__(self, data: bytes, things: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(data))
        self._things = things

    def persistent_load(self, pid: str) -> object:
        """Return the shared object of this name."""
        return self._things[pid]


_HEAD = struct.Struct("<qq")
"""Head of a message: the number of a job, else 0, and the bytes that follow."""


def _write(file: IO[bytes], data: bytes, number: int) -> None:
    """Write a message, its head and its bytes, and flush the file."""
    file.write(_HEAD.pack(number, len(data)))
    file.write(data)
    file.flush()


def _read(file: IO[bytes]) -> tuple[int, bytes]:
    """Read a message, and return its number and its bytes; raise `EOFError` if the pipe ends first."""
    head = file.read(_HEAD.size)
    if len(head) == _HEAD.size:
        number, size = _HEAD.unpack(head)
        data = file.read(size)
        if len(data) == size:
            return number, data
    raise EOFError


class Child:
    """Python process that calls the `main` of a module with `arguments`, and the messages to and from it.

    - `environment`: its environment variables; by default those of this process. Its temporary files then go to
      `temporary_folder`, since it is killed in the end and removes none.
    - `stderr`: destination of its stderr and of all that its libraries print; by default this process's stderr.
    - `session`: True for its own session. Signals from the terminal do not reach it, and its children end with it.
    - `watched`: as in `python_command`.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stderr: IO[bytes] | int | None = None,
        session: bool = False,
        watched: bool = True,
    ) -> None:
        if environment is None and (folder := temporary_folder()) is not None:
            environment = {**os.environ, "TMPDIR": str(folder)}
        self._process = subprocess.Popen(
            python_command(module, *arguments, watched=watched),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=session,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._into, self._source = self._process.stdin, self._process.stdout
        self._session = session
        self._speaking, self._ending = threading.Lock(), threading.Lock()
        self._ended = False

    @property
    def alive(self) -> bool:
        """True if the process is running."""
        return not self._ended and self._process.poll() is None

    def send(self, data: bytes, number: int = 0) -> None:
        """Send a message to the process; `number` is that of its job, else 0.

        Raises `OSError` or `ValueError` if its stdin is closed.
        """
        with self._speaking:
            _write(self._into, data, number)

    def receive(self) -> tuple[int, bytes]:
        """Wait for a message from the process; return its number and its bytes. Raises `EOFError` at the end."""
        return _read(self._source)

    def how_it_ended(self) -> str:
        """Return a predicate that explains the end of the process, such as `ended with code 1`.

        It is `closed its pipe` if the process still runs after a second.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return "closed its pipe"

    def hang_up(self) -> None:
        """Close the stdin of the process, which then ends."""
        with contextlib.suppress(OSError, ValueError):
            self._into.close()

    def end(self, patience_s: float = 0.0) -> None:
        """End the process with SIGKILL, and close its pipes; a second call does nothing.

        With patience, hang up first, and kill only if the process has not ended after so many seconds.
        """
        with self._ending:
            if self._ended:
                return
            self._ended = True
        if not self._leaves(patience_s):
            self._kill()
        count_ended(self._process.pid)
        self.hang_up()
        with contextlib.suppress(OSError, ValueError):
            self._source.close()

    def _leaves(self, patience_s: float) -> bool:
        """Close stdin, and return True if the process then ends within so many seconds.

        Without patience return False at once, and leave stdin open.
        """
        if patience_s > 0:
            self.hang_up()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                return True
        return False

    def _kill(self) -> None:
        """Kill the process, or all processes of its own session, and wait until they are gone, `GROUP_S` at most."""
        if not self._session:
            self._process.kill()
            self._process.wait()
            return
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        until = time.monotonic() + GROUP_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < until:
                os.killpg(group, 0)
                time.sleep(0.02)


class Worker(Child):
    """Child process that runs jobs, one after the other.

    - `prepare`: `module:function` that it calls first, or a module that it imports first.
    - `counted`: True if its processor seconds so far count in `processor_seconds` of this process.
    - `environment`, `stderr`, `session`: as for `Child`.
    """

    def __init__(
        self,
        prepare: str | None = None,
        *,
        counted: bool = False,
        environment: Mapping[str, str] | None = None,
        stderr: IO[bytes] | None = None,
        session: bool = False,
    ) -> None:
        arguments = [prepare] if prepare else []
        super().__init__(__name__, *arguments, environment=environment, stderr=stderr, session=session)
        self._things: dict[str, object] = {}
        self._counted = counted

    def call(self, job: Job, shared: Sequence[Shared] = ()) -> tuple[Any, float]:
        """Run a job in the worker and return its result and the processor seconds that it used.

        Shared objects that the worker lacks are sent first, and those no longer in `shared` are dropped. For a job that
        raised `Stopped` the result is that exception. A worker runs one call at a time.

        Raises the call's own `UserError`, a `RuntimeError` with the text of any other `Exception`, or `WorkerEnded`.
        """
        try:
            for name in self._things.keys() - {each.name for each in shared}:
                self.send(pickled(name))
                del self._things[name]
            for each in shared:
                if self._things.get(each.name) is not each.thing:
                    self.send(each.data or pickled((each.name, each.sent), self._names()))
                    self._things[each.name] = each.thing
            self.send(pickled((job.call, job.arguments, job.stoppable), self._names()), job.number)
            _, data = self.receive()
        except (OSError, EOFError, ValueError) as error:
            raise WorkerEnded(self.how_it_ended()) from error
        done, value, seconds, total = _Unpickler(data, self._things).load()
        if self._counted:
            with self._ending:
                if not self._ended:
                    count_living(self._process.pid, total)
        if not done:
            raise value if isinstance(value, UserError) else RuntimeError(value)
        return value, seconds

    def _names(self) -> dict[int, str]:
        """Return the name of each shared object by its `id`."""
        return {id(thing): name for name, thing in self._things.items()}

    def stop(self, job: Job) -> None:
        """Send the message that the result of a job is no longer needed, before or after the job itself is sent."""
        with contextlib.suppress(OSError, ValueError):
            self.send(b"", job.number)


class Parent:
    """Pipes from a child process to the process that started it, over the child's stdin and stdout.

    Its constructor redirects descriptor 1, so that output of libraries goes to stderr, line by line.
    """

    def __init__(self) -> None:
        self._sink = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A process that is killed does not write its buffer.
            sys.stdout.reconfigure(line_buffering=True)
        self._speaking = threading.Lock()

    def send(self, data: bytes, number: int = 0) -> None:
        """Send a message; ignore a parent that is gone, since this process ends with its stdin."""
        with self._speaking, contextlib.suppress(OSError):
            _write(self._sink, data, number)

    def receive(self) -> tuple[int, bytes]:
        """Wait for a message, and return its number and its bytes. Raises `EOFError` at the end."""
        return _read(sys.stdin.buffer)


def main(prepare: str | None = None) -> None:
    """Run as a worker: execute the jobs that arrive on stdin, and exit when stdin ends.

    Each answer is (success, value, seconds of the job, seconds so far), pickled. After an error the value is the
    `UserError` or the text of another exception; for a job that was stopped it is its `Stopped`.

    - `prepare`: `module:function` to call first, or a module to import first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles the interrupt and ends its workers
    collect_seldom()
    parent = Parent()
    inbox = _Inbox(parent)
    threading.Thread(target=inbox.listen, daemon=True).start()
    if prepare:
        module, _, function = prepare.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    while True:
        number, call, arguments = inbox.next_job()
        began = processor_seconds()
        try:
            answer = True, call(*arguments)
        except Stopped as stopped:
            answer = True, stopped
        except UserError as error:
            answer = False, UserError(str(error))
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        total = processor_seconds()
        names = {id(thing): name for name, thing in inbox.things.items()}
        parent.send(pickled((*answer, total - began, total), names), number)


class _Inbox:
    """Messages that a worker has received, and its shared objects by name.

    A thread reads the messages, so that the parent never waits and a job can be stopped. Only the main thread unpickles
    them: two threads that import may each see the other's modules half initialised.
    """

    def __init__(self, parent: Parent) -> None:
        self.things: dict[str, object] = {}
        self._parent = parent
        self._waiting: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._stopped = 0
        """Number of the last job that was stopped."""
        self._running = 0, threading.Event()
        """Number of the current job, and the event that stops it."""

    def listen(self) -> None:
        """Read messages until stdin ends; then exit the process. An empty message stops the job of its number."""
        while True:
            try:
                number, data = self._parent.receive()
            except EOFError:
                os._exit(0)
            if data:
                self._waiting.put((number, data))
                continue
            self._stopped = number
            running, stop = self._running
            if running == number:
                stop.set()

    def next_job(self) -> tuple[int, Callable[..., Any], tuple[Any, ...]]:
        """Share and drop objects until a job arrives; return its number, its call (`stop` bound) and the arguments.

        A message that cannot be unpickled ends the process with code 1.
        """
        while True:
            number, data = self._waiting.get()
            try:
                message = _Unpickler(data, self.things).load()
            except Exception as error:
                print(f"autoshard: a helper process cannot read its work: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            # A message is a name (drop that object), a pair (share an object), or three values (a job).
            match message:
                case str(name):
                    del self.things[name]
                case (str(name), thing):
                    self.things[name] = thing
                case (call, arguments, stoppable):
                    stop = threading.Event()
                    self._running = number, stop
                    if self._stopped == number:  # the stop arrived before the job
                        stop.set()
                    return number, functools.partial(call, stop=stop) if stoppable else call, arguments
