"""Processes that run one script, for tests across processes."""

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import forked


def run_workers(
    script: str, arguments: Sequence[str], timeout_s: float = 300.0, count: int = 2, **environment: str
) -> list[Any]:
    """Return the JSON that each of `count` workers prints last. They receive their number, a free port and `arguments`.

    The workers do not inherit `XLA_FLAGS`; `environment` is added. No worker outlives the call.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    commands = [["-c", script, str(number), port, *arguments] for number in range(count)]
    env = inherited | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment
    workers = forked.server().run(commands, env=env, timeout_s=timeout_s)
    for worker in workers:
        assert worker.returncode == 0, worker.stderr[-2000:]
    return [json.loads(worker.stdout.splitlines()[-1]) for worker in workers]
