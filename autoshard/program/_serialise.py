"""A module as bytes, and what tells one program from another."""

import hashlib
import io
import json
from collections.abc import Sequence
from typing import Any

from autoshard.program._program import Argument


def serialise(ir_module: Any, arguments: Sequence[Argument]) -> tuple[bytes, str]:
    """MLIR bytecode of a module, and the sha256 over its text without locations and over argument names and roles."""
    operation = ir_module.operation
    buffer = io.BytesIO()
    operation.write_bytecode(buffer)
    text = operation.get_asm(enable_debug_info=False, binary=False)
    digest = hashlib.sha256(text.encode())
    digest.update(json.dumps([[a.name, a.role.value] for a in arguments]).encode())
    return buffer.getvalue(), digest.hexdigest()
