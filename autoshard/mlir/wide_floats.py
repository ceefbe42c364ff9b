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
_BITS = re.compile(
    r'"stablehlo\.bitcast_convert"\((%[^)]*)\) : \(tensor<((?:\d+x)*)(\w+)>\) -> tensor<((?:\d+x)*)(\w+)>'
)
"""An op that reads bits as numbers or numbers as bits: its operand, and dims and dtypes of operand and result."""
_BITS_OF = re.compile(r"bits:(\w+)")
"""A narrow float that stays narrow, in a text of which the others are widened."""


def widened(module: Any) -> str:
    """Return the text of a module in which all floats of `NARROW` are float64.

    Ops keep their number and order, so that the pins of a plan apply. Bits keep their width: random bits become the
    same numbers as in the module itself. A module that gives floats to custom calls may come out as text that does not
    parse or compile. So may one whose floats have other dims than their bits.
    """
    text = module.operation.get_asm(large_elements_limit=None, print_generic_op_form=True)
    return _BITS_OF.sub(r"\1", _TYPE.sub("f64", _BITS.sub(_narrow_bits, _CONSTANT.sub(_widened_constant, text))))


def _narrow_bits(match: re.Match[str]) -> str:
    """Rewrite a bitcast as one op that reads the bits of the narrow float and converts it from or to float64."""
    operand, dims, source, result_dims, target = match.groups()
    if dims != result_dims or not {source, target} & set(_SHORT):
        return match[0]
    steps, value, dtype = [], "%bits", source
    if source in _SHORT:
        steps.append(("convert", source, f"bits:{source}"))
    steps.append(("bitcast_convert", *(f"bits:{each}" if each in _SHORT else each for each in (source, target))))
    if target in _SHORT:
        steps.append(("convert", f"bits:{target}", target))
    lines = []
    for number, (name, one, other) in enumerate(steps):
        lines.append(f'%bits{number} = "stablehlo.{name}"({value}) : (tensor<{one}>) -> tensor<{other}>')
        value, dtype = f"%bits{number}", other
    body = "\n".join(
        [f"^bb0(%bits: tensor<{source}>):", *lines, f'"stablehlo.return"({value}) : (tensor<{dtype}>) -> ()']
    )
    numbers = ", ".join(map(str, range(dims.count("x"))))
    mapped = f"array<i64: {numbers}>" if numbers else "array<i64>"
    types = f"(tensor<{dims}{source}>) -> tensor<{dims}{target}>"
    return f'"stablehlo.map"({operand}) <{{dimensions = {mapped}}}> ({{\n{body}\n}}) : {types}'


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
