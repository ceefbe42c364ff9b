"""Kernels behind the custom calls of a compiled program: FLOPs and traffic of Pallas and cuDNN kernels."""

import dataclasses
import math
import re
from collections.abc import Sequence

from autoshard.cost import LANES
from autoshard.exec.hlo.hlo_text import Computation, Instruction, Shape


_IDLE = frozenset({"AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "annotate_device_placement"})
"""Targets of calls that only reserve memory or carry annotations for the compiler."""

_ATTENTION = re.compile(r"flash_attention|splash_m[hq]a")
"""Names of jax's attention kernels for TPUs."""

_CUDNN = "__cudnn$fmhaSoftmax"
"""Beginning of the targets of cuDNN's attention."""

_HEADS_AT_2 = re.compile(
    r'"bmm1(?:_grad_gemm1)?_dot_dimension_numbers":\s*\{[^}]*"rhs_batch_dimensions":\s*\["0",\s*"2"\]'
)
"""Dim numbers of a first matmul whose heads are dim 2 of its right operand."""

_FLOPS = {"fwd": 4, "dkv": 8, "dq": 6}
"""FLOPs of jax's attention kernels for each pair of positions and head channel: two matmuls, four, three."""
_BLOCK = 512
"""Queries, and keys, in one block of scores if the text does not give it: the default of jax's kernels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One call of a kernel on one device."""

    name: str
    """Name of the scope around the call, or of the instruction."""
    flops: float
    """Matrix FLOPs of one call."""
    traffic: float
    """Bytes read from and written to main memory."""
    head: int = 0
    """The head dim over which an attention kernel multiplies; 0 for any other kernel."""
    steps: float = 0.0
    """Number of blocks of scores that an attention kernel computes; 0 for other kernels and for cuDNN."""

    @property
    def score_passes(self) -> float:
        """Number of scores of an attention kernel times the matmuls over them; 0 for any other kernel."""
        return self.flops / (2.0 * self.head) if self.head else 0.0


def is_idle(op: Instruction) -> bool:
    """Return True if a custom call takes no time, by its target."""
    target = re.search(r'custom_call_target="([^"]*)"', op.attributes)
    return target is not None and target[1] in _IDLE


def read_kernel(owner: Computation, op: Instruction) -> Kernel | None:
    """Return the kernel of a custom call; None if the call is no Pallas kernel and no attention of cuDNN.

    FLOPs and traffic are the kernel's own figures (`cost_estimate`). Without FLOPs an attention kernel has those of all
    pairs of positions, and another kernel none. Without traffic it is that of operands and results.
    """
    if _CUDNN in op.attributes:
        return _cudnn(owner, op)
    if 'custom_call_target="tpu_custom_call"' not in op.attributes:
        return None
    name = _name(op)
    operands = [owner.by_name[o].shapes[0] for o in op.operands if o in owner.by_name and owner.by_name[o].shapes]
    floats = [s for s in operands if len(s.dims) >= 3 and s.dtype in ("bf16", "f16", "f32")]
    head = floats[0].dims[-1] if floats and _ATTENTION.search(name) else 0
    flops, traffic = (_figure(op, key) for key in ("flops", "bytes_accessed"))
    if not flops and head and len(floats) > 1:
        queries, keys = floats[:2]
        flops = _flops_of(name) * math.prod(queries.dims) * keys.dims[-2]
    steps = 0.0
    if head and len(floats) > 1:
        scores = flops / (_flops_of(name) * head)
        steps = scores / math.prod(_block(operands, floats[0], floats[1].dims[-2], scores))
    return Kernel(name, flops, traffic or sum(s.bytes for s in operands) + op.bytes, head, steps)


def _cudnn(owner: Computation, op: Instruction) -> Kernel | None:
    """Return cuDNN's attention: two matmuls over the scores forward, five backward; a causal mask omits half of them.

    Heads are dim 1 or 2 of queries and keys, as the dim numbers of the first matmul show; positions are the other dim.
    Returns None if queries or keys are unknown or have no four dims.
    """
    shapes = [owner.by_name[o].shapes[0] for o in op.operands[:2] if o in owner.by_name and owner.by_name[o].shapes]
    if len(shapes) < 2 or any(len(shape.dims) != 4 for shape in shapes):
        return None
    queries, keys = shapes
    matmuls = 5 if f"{_CUDNN}Backward" in op.attributes else 2
    share = 0.5 if re.search(r'"mask_type":\s*"\w*CAUSAL', op.attributes) else 1.0
    positions = 1 if _HEADS_AT_2.search(op.attributes) else 2
    flops = 2.0 * matmuls * share * math.prod(queries.dims) * keys.dims[positions]
    traffic = sum(owner.by_name[o].shapes[0].bytes for o in op.operands if o in owner.by_name) + op.bytes
    return Kernel(_name(op), flops, traffic, queries.dims[-1])


def _block(operands: Sequence[Shape], queries: Shape, keys: int, scores: float) -> tuple[int, int]:
    """Return the queries and keys of a block of scores.

    - `operands`: arrays of the call.
    - `queries`: array of queries, with positions as its last dim but one.
    - `keys`: number of key positions.
    - `scores`: number of scores that the call computes.

    Splash attention's tables `[heads, rows, columns]` have one entry for each block. A window leaves fewer rows or
    columns than there are blocks, and then nearly every entry is computed. Sides are therefore too long if less than
    half of the entries would be computed, or if they are no multiple of a register's lanes. Then the smaller side
    counts for both. Without a mask that omits blocks, at least half of them are computed. Without tables both sides are
    `_BLOCK`, and no side exceeds its positions.
    """
    length = queries.dims[-2]
    for shape in operands:
        if shape.dtype in ("s8", "s16", "s32") and len(shape.dims) == 3 and min(shape.dims) > 0:
            rows, columns = shape.dims[1:]
            sides = length // rows, keys // columns
            entries = math.prod(queries.dims[:-2]) * rows * columns
            aligned = all(side and side % LANES == 0 for side in sides)
            if not aligned or scores < 0.5 * entries * math.prod(sides):
                sides = (min(sides) or _BLOCK,) * 2
            return min(sides[0], length), min(sides[1], keys)
    return min(_BLOCK, length), min(_BLOCK, keys)


def _flops_of(name: str) -> int:
    """Return the FLOPs of an attention kernel for each pair of positions and head channel, by its name; 4 for an
    unknown name.
    """
    return next((n for key, n in _FLOPS.items() if key in name), 4)


def _name(op: Instruction) -> str:
    """Return the scope directly around the call (`.../splash_mha_fwd/pallas_call`), or the instruction's own name."""
    parts = op.op_name.split("/")
    return parts[-2] if len(parts) > 1 and parts[-1] == "pallas_call" else op.name


def _figure(op: Instruction, key: str) -> float:
    """Return a figure of a kernel's `cost_estimate`, 0 without one."""
    match = re.search(rf'"cost_estimate":\{{[^}}]*"{key}":"?(\d+)', op.attributes)
    return float(match[1]) if match else 0.0
