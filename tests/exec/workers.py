"""Pairs of processes that run one script, for tests across processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_workers(script: str, arguments: Sequence[str], timeout_s: float = 300.0, **environment: str) -> list[Any]:
    """Return the JSON that each of two workers prints last. They receive their number, a free port and `arguments`.

    The workers do not inherit `XLA_FLAGS`; `environment` is added. No worker outlives the call.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(number), port, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment,
        )
        for number in (0, 1)
    ]
    try:
        outputs = [worker.communicate(timeout=timeout_s) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for (_, err), worker in zip(outputs, workers, strict=True):
        assert worker.returncode == 0, err[-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]
