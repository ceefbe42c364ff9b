"""The command in a process of its own, as a user starts it."""

import os
import subprocess
import sys


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_AUTO_SPMD_MESH"}
    environment |= options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "autoshard", *arguments],
        capture_output=True,
        text=True,
        env={key: value for key, value in environment.items() if value is not None},
        **options,
    )
