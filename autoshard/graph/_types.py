"""MLIR types as text: shapes, dtypes and sizes of tensors."""

import functools
import re


_TENSOR = re.compile(r"tensor<((?:\d+x)*)(complex<f\d+>|[a-zA-Z0-9]+)(?:,.*)?>")
_DTYPES = {
    "f64": ("float64", 8), "f32": ("float32", 4), "f16": ("float16", 2), "bf16": ("bfloat16", 2),
    "i1": ("bool", 1), "i4": ("int4", 1), "ui4": ("uint4", 1), "i8": ("int8", 1), "ui8": ("uint8", 1),
    "i16": ("int16", 2), "ui16": ("uint16", 2), "i32": ("int32", 4), "ui32": ("uint32", 4),
    "i64": ("int64", 8), "ui64": ("uint64", 8), "f8E4M3FN": ("float8_e4m3fn", 1), "f8E5M2": ("float8_e5m2", 1),
    "complex<f32>": ("complex64", 8), "complex<f64>": ("complex128", 16),
}  # fmt: skip


@functools.lru_cache(maxsize=8192)
def parse_type(text: str) -> tuple[tuple[int, ...], str, int]:
    """Shape, dtype name and bytes per element of an MLIR tensor type; tokens and tuples count nothing."""
    match = _TENSOR.match(text)
    if match is None:
        return (), "token", 0
    dims, element = match.groups()
    shape = tuple(int(d) for d in dims.split("x")[:-1])
    if element not in _DTYPES:
        return shape, element, 1
    dtype, size = _DTYPES[element]
    return shape, dtype, size
