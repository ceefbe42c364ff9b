"""Processes that start with the frameworks imported: a server imports them once, and forks for each command.

A start costs next to nothing here, and several seconds of imports otherwise. Such a process receives its arguments,
folder and environment like any other, and ends as the interpreter ends. Tests of imports, and of variables that Python
or JAX reads at an import, start an interpreter with `subprocess` instead.

`python -m tests.forked NAME ...` is the server, which imports the named modules.
"""

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("jax", "torch", "functorch.compile", "torch._inductor.fx_passes.post_grad", "torch.distributed.tensor")
FRAMEWORKS += ("autoshard.planning", "autoshard.exec", "autoshard.program")
"""Modules that most processes of the tests import.

Most of `import torch_xla` is torch's compiler. The rest reads the environment and is left to the forked process, as is
transformers.
"""
_NOT_HANDED_ON = ("XLA_", "PJRT_", "AUTOSHARD_")
"""Prefixes of variables that the server itself does without, so that what it imports cannot depend on them."""


class Server:
    """Process that has imported modules, and forks for commands."""

    def __init__(self, modules: Sequence[str]) -> None:
        here = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_HANDED_ON)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=here | {"PYTHONPATH": str(ROOT)},
        )

    def run(
        self,
        commands: Sequence[Sequence[str]],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run commands at the same time: Python's arguments, which are a file, or `-m` or `-c` and what follows."""
        with tempfile.TemporaryDirectory() as folder:
            request = {
                "commands": [list(command) for command in commands],
                "cwd": str(cwd or Path.cwd()),
                "env": dict(os.environ if env is None else env),
                "folder": folder,
                "timeout": timeout_s,
            }
            assert self._process.stdin is not None and self._process.stdout is not None
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            assert answer, "the server of forked processes ended"
            return [
                subprocess.CompletedProcess(command, code, *_said(folder, number))
                for number, (command, code) in enumerate(zip(commands, json.loads(answer), strict=True))
            ]

    def close(self) -> None:
        """End the server."""
        self._process.communicate()


def _said(folder: str, number: int) -> tuple[str, str]:
    out, err = (Path(folder, f"{number}.{name}").read_text(encoding="utf-8") for name in ("out", "err"))
    return out, err


@functools.cache
def server(*modules: str) -> Server:
    """Return the server with these modules, `FRAMEWORKS` if none is named, which lives as long as this process."""
    started = Server(modules or FRAMEWORKS)
    atexit.register(started.close)
    return started


def run(command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Any:
    """Run one command with the frameworks imported."""
    return server().run([command], cwd, env)[0]


def _enter(command: Sequence[str], request: Mapping[str, Any], number: int, first: Mapping[str, str]) -> None:
    """Give the process the streams, folder, environment and import path of its command."""
    for stream, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{request['folder']}/{number}.out", os.O_WRONLY | os.O_CREAT),
        (2, f"{request['folder']}/{number}.err", os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(name, flags)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(request["cwd"])
    for gone in first.keys() - request["env"].keys():
        os.environ.pop(gone, None)
    os.environ |= request["env"]
    if os.environ.get("PYTHONFAULTHANDLER"):
        importlib.import_module("faulthandler").enable()
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    place = str(Path(command[0]).resolve().parent) if len(command) and command[0] not in ("-m", "-c") else ""
    rest = [each for each in sys.path if each not in ("", str(ROOT), *given)]
    sys.path[:] = [place, *given, *rest, str(ROOT)]  # last, as an editable installation adds it
    importlib.invalidate_caches()


def _execute(command: Sequence[str]) -> None:
    runpy = importlib.import_module("runpy")
    kind, *rest = command
    if kind == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = list(command)
        runpy.run_path(kind, run_name="__main__")


def _wait(children: list[int], timeout_s: float) -> list[int]:
    """Return the exit codes of children, and kill what runs too long."""
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout_s
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(found[1])
            elif child not in codes and time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]


def serve(modules: Sequence[str]) -> Callable[[], None] | None:
    """Import the modules and answer requests. Return None at their end, and what to execute in a forked process."""
    first = dict(os.environ)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the imports is no answer
    for name in modules:
        importlib.import_module(name)
    gc = importlib.import_module("gc")
    gc.collect()
    gc.freeze()  # children neither collect these objects nor copy their pages for it
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        children: list[int] = []
        for number, command in enumerate(request["commands"]):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of its threads, which it has not started
                child = os.fork()
            if not child:
                _enter(command, request, number, first)
                return functools.partial(_execute, command)
            children.append(child)
        print(json.dumps(_wait(children, request["timeout"])), file=answers, flush=True)
    return None


if __name__ == "__main__":
    if (execute := serve(sys.argv[1:])) is not None:
        execute()
