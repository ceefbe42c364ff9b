"""Modules in float64: the same ops in the same order, with every narrower float widened."""

import re
from typing import Any

import numpy as np


NARROW = ("float32", "bfloat16", "float16")
"""Dtypes that are widened."""

_SHORT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_TYPE = re.compile(r"(?<=[x<(,\s])(?:f32|bf16|f16)\b(?! =)")
"""A narrow float as a type or as the element of a tensor's type, in MLIR text."""
_HEX = re.compile(r'"?0x([0-9A-Fa-f]+)"?')
_CONSTANT = re.compile(r"dense<([^<>]*)> : tensor<[^<>]*?\b(?:\d+x)*(f32|bf16|f16)>")


def widened(module: Any) -> str:
    """Return the text of a module in which all floats of `NARROW` are float64.

    Ops keep their number and order, so that the pins of a plan apply. A module that reads the bits of floats, or gives
    floats to custom calls, may come out as text that does not parse or compile.
    """
    text = module.operation.get_asm(large_elements_limit=None, print_generic_op_form=True)
    return _TYPE.sub("f64", _CONSTANT.sub(_widened_constant, text))


def _widened_constant(match: re.Match[str]) -> str:
    """Rewrite the hexadecimal numbers of a constant for float64; its type is not changed."""
    from jax.numpy import dtype

    narrow = dtype(_SHORT[match[2]])

    def wide(number: re.Match[str]) -> str:
        """Rewrite one number, or the bytes of a whole array in quotation marks."""
        digits = number[1]
        if not number[0].startswith('"'):
            bits = np.array(int(digits, 16), f"uint{8 * narrow.itemsize}")
            return f"0x{int(bits.view(narrow).astype(np.float64).view(np.uint64)):016X}"
        return f'"0x{np.frombuffer(bytes.fromhex(digits), narrow).astype("<f8").tobytes().hex().upper()}"'

    body = match[0][len("dense<") : len("dense<") + len(match[1])]
    return match[0].replace(body, _HEX.sub(wide, body), 1)
