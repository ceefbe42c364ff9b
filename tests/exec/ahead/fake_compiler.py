"""Stand-in for the compiler; it imports nothing heavy, since another process runs it."""

import dataclasses
import os
import subprocess
from typing import Any


@dataclasses.dataclass(frozen=True)
class FakeCompiler:
    """A call that runs a shell command on a folder, ends as the command does if that fails, else returns a result."""

    script: str
    result: dict[str, Any] | None = None

    def __call__(self, folder: str) -> dict[str, Any] | None:
        code = subprocess.run(["sh", "-c", self.script, "sh", folder], stdin=subprocess.DEVNULL).returncode
        if code < 0:
            os.kill(os.getpid(), -code)
        if code > 0:
            os._exit(code)
        return self.result
