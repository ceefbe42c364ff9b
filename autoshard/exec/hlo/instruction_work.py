"""Work of one instruction of optimised HLO: matrix FLOPs, main-memory traffic, elementwise operations."""

import dataclasses
import functools
import math
import re

from autoshard.exec.hlo.hlo_text import Computation, HloModule, Instruction, Shape
from autoshard.exec.hlo.tpu_kernels import Kernel, is_idle, read_kernel


FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "optimization-barrier",
        "add-dependency",
        "domain",
        "copy-done",
    }
)
"""Opcodes of instructions that take no time."""

_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element", "copy", "convert", "transpose"})
"""Opcodes of instructions that only move or reinterpret elements of one operand."""
_NO_ARITHMETIC = (
    _VIEWS | FREE | {"broadcast", "slice", "concatenate", "pad", "iota", "dynamic-slice", "dynamic-update-slice"}
)
"""Opcodes without elementwise operations."""
_UPDATE = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcode that writes in place -> the operand whose values overwrite those of operand 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """One dot or convolution in the dims of the matrix unit; a batch counts in `flops` only, for dots."""

    m: int
    """Rows of the result, from the left operand."""
    n: int
    """Columns of the result, from the right operand."""
    k: int
    """Size of the contracted dims."""
    flops: float
    """FLOPs of all batches: 2 m n k for each."""
    dtype: str
    """HLO dtype of the left operand."""
    passes: int
    """Number of bf16 passes that a higher precision of 32-bit floats needs, else 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class InstructionWork:
    """Work of one execution on one device."""

    matmuls: tuple[Matmul, ...]
    """Dots and convolutions, those inside a fusion included."""
    hbm_bytes: int
    """Bytes read from and written to main memory, padding of tiles included, since it moves with the elements."""
    vmem_bytes: int
    """Bytes read from and written to other memory spaces, such as VMEM."""
    elements: float
    """Elementwise operations of one execution."""
    kernel: Kernel | None = None
    """The Pallas or cuDNN kernel that does all of the work, if there is one; the other fields are then 0 or empty."""

    @property
    def flops(self) -> float:
        """Matrix FLOPs of one execution, those of the kernel included."""
        return sum(matmul.flops for matmul in self.matmuls) + (self.kernel.flops if self.kernel else 0.0)


class Reader:
    """Derivation of the work of each instruction of one module."""

    def __init__(self, module: HloModule, burst_bytes: int = 1) -> None:
        """Read no instruction yet.

        - `burst_bytes`: least bytes that one access to main memory moves.
        """
        self.module = module
        self.burst_bytes = burst_bytes
        self._inside: dict[str, tuple[tuple[Matmul, ...], float]] = {}

    def work(self, owner: Computation, op: Instruction) -> InstructionWork:
        """Return the work of an instruction of `owner` that is no loop, call or collective; zeros for one that takes no
        time.

        A Pallas or cuDNN kernel has only `kernel`. A fusion has the arithmetic of its computation and the traffic of
        its operands and results.
        """
        if op.opcode in FREE or (op.opcode == "custom-call" and is_idle(op)):
            return InstructionWork((), 0, 0, 0.0)
        if op.opcode == "custom-call":
            kernel = read_kernel(owner, op)
            if kernel is not None:
                return InstructionWork((), 0, 0, 0.0, kernel)
        matmuls, elements = self._arithmetic(owner, op)
        hbm, vmem = self._traffic(owner, op)
        return InstructionWork(matmuls, hbm, vmem, elements)

    # Arithmetic

    def _arithmetic(self, owner: Computation, op: Instruction) -> tuple[tuple[Matmul, ...], float]:
        """Return the matmuls and the number of elementwise operations of an instruction.

        Reductions, scatters and sorts count the elements of their first operand, and data movement counts none. Other
        ops count the elements of their first result. Fusions and calls sum up their computation.
        """
        if op.opcode in ("fusion", "call"):
            return self._inner_arithmetic(_called(op))
        if op.opcode in ("dot", "convolution"):
            return (_matmul(owner, op),), 0.0
        if op.opcode == "custom-call":
            library_matmul = _library_call(owner, op)
            return ((library_matmul,) if library_matmul is not None else ()), 0.0
        if op.opcode in _NO_ARITHMETIC or not op.shapes:
            return (), 0.0
        if op.opcode in ("reduce", "reduce-window", "scatter", "sort"):
            source = owner.by_name.get(op.operands[0])
            return (), float(math.prod(source.shapes[0].dims)) if source is not None and source.shapes else 0.0
        return (), float(math.prod(op.shapes[0].dims))

    def _inner_arithmetic(self, name: str) -> tuple[tuple[Matmul, ...], float]:
        """Return the matmuls and elementwise operations of a called computation, cached by its name; none if it does
        not exist.
        """
        if name not in self._inside:
            computation = self.module.computations.get(name)
            matmuls: list[Matmul] = []
            elements = 0.0
            for inner in computation.instructions if computation is not None else ():
                inner_matmuls, count = self._arithmetic(computation, inner) if computation is not None else ((), 0.0)
                matmuls += inner_matmuls
                elements += count
            self._inside[name] = (tuple(matmuls), elements)
        return self._inside[name]

    # Traffic

    def _traffic(self, owner: Computation, op: Instruction) -> tuple[int, int]:
        """Return the padded bytes that an instruction moves in main memory, and in other memory spaces.

        Slices read only their result, in-place updates only write the update, and broadcasts read nothing. Gathers and
        scatters move their rows (`_rows`). Other operands are read whole, those of a fusion as `_read` finds. The space
        is that of the operand's or result's first array.
        """
        moved = [0, 0]

        def count(shape: Shape, size: int) -> None:
            """Add `size` bytes to the memory of a shape: main memory for space 0, else the others."""
            moved[0 if shape.space == 0 else 1] += size

        inside = self.module.computations.get(_called(op)) if op.opcode == "fusion" else None
        for number, name in enumerate(op.operands):
            source = owner.by_name.get(name)
            if source is None:
                continue
            if inside is not None:
                size = self._read(inside, number, sum(s.padded_bytes for s in source.shapes))
            elif op.opcode in ("dynamic-slice", "slice") and number == 0:
                size = op.padded_bytes
            elif op.opcode == "gather" and number == 0:
                size = self._rows(owner, op)
            elif op.opcode in ("dynamic-update-slice", "scatter") and number == 0:
                size = 0
            elif op.opcode == "broadcast":
                size = 0
            else:
                size = sum(s.padded_bytes for s in source.shapes)
            if source.shapes:
                count(source.shapes[0], size)
        if inside is not None:
            for shape, size in zip(op.shapes, self._written(inside, op.shapes), strict=True):
                count(shape, size)
        elif op.opcode == "scatter":
            count(op.shapes[0], 2 * self._rows(owner, op))
        elif op.opcode == "dynamic-update-slice":
            update = owner.by_name.get(op.operands[1])
            count(op.shapes[0], update.padded_bytes if update is not None else op.padded_bytes)
        else:
            for shape in op.shapes:
                count(shape, shape.padded_bytes)
        return moved[0], moved[1]

    def _read(self, computation: Computation, number: int, whole: int) -> int:
        """Return the bytes that a fused computation reads of parameter `number`: only its slices if nothing else is
        used.

        `whole` has the parameter's bytes, the result's upper limit and its value for an unknown parameter.
        """
        parameter = computation.parameters.get(number)
        if parameter is None:
            return whole
        return sum(self._used(computation, parameter.name, whole, 0))

    def _used(self, computation: Computation, name: str, whole: int, depth: int, made: bool = False) -> tuple[int, int]:
        """Return the bytes of the value `name` that its users stream, and of the rows that they gather.

        At most `whole` bytes are streamed. Slices count their results; in-place targets and returned values count
        nothing. Reshapes, nested fusions and ops that map or move elements are followed to `depth` 20. Any other user
        reads the whole. A row counts as often as it is gathered.

        - `made`: True for a value that the computation makes of the one in memory; returning it reads the whole.
        """
        total, rows = (whole if made and computation.root.name == name else 0), 0
        for user in computation.users.get(name, ()):
            first = bool(user.operands) and user.operands[0] == name
            ends: list[tuple[Computation, str, bool]] = []
            if user.opcode == "gather" and first:
                rows += self._rows(computation, user)
            elif user.opcode in ("dynamic-slice", "slice") and first:
                total += user.padded_bytes
            elif user.opcode in ("dynamic-update-slice", "scatter") and first:
                total += 0
            elif user.opcode in ("bitcast", "reshape") and depth < 20:
                ends.append((computation, user.name, made))
            elif user.opcode == "fusion" and depth < 20:
                inner = self.module.computations.get(_called(user))
                for number, operand in enumerate(user.operands):
                    if operand == name and inner is not None:
                        parameter = inner.parameters.get(number)
                        if parameter is None:
                            total = whole
                            continue
                        ends.append((inner, parameter.name, False))
                        if _hands_on(inner, number):
                            ends.append((computation, user.name, made))
            elif _keeps_elements(computation, user, name) and depth < 20:
                ends.append((computation, user.name, True))
            elif user.opcode == "tuple" and not made:
                total += 0  # returned unchanged
            else:
                total = whole
            for there, value, computed in ends:
                streamed, gathered = self._used(there, value, whole, depth + 1, computed)
                total, rows = total + streamed, rows + gathered
        return min(whole, total), rows

    def _rows(self, computation: Computation, op: Instruction) -> int:
        """Return the bytes of one pass over the rows that a gather or scatter touches in its table.

        A gather reads its rows, and a scatter reads and writes them: `HloCostAnalysis` of XLA counts them so. Rows are
        padded as the table is. In main memory each row takes whole bursts.
        """
        table, parts = computation.by_name.get(op.operands[0]), op
        if op.opcode == "scatter":
            parts = computation.by_name.get(op.operands[_UPDATE[op.opcode]])
        if table is None or parts is None or not table.shapes or not parts.shapes:
            return op.padded_bytes
        dims = parts.shapes[0].dims
        if op.opcode == "gather":
            row = math.prod(_numbers(op.attribute("slice_sizes")))
        else:
            row = math.prod(dims[d] for d in _numbers(op.attribute("update_window_dims")))
        own = table.padded_bytes * row / max(1, math.prod(table.shapes[0].dims))
        burst = self.burst_bytes if op.shapes[0].space == 0 and table.shapes[0].space == 0 else 1
        return math.prod(dims) // max(1, row) * math.ceil(own / burst) * burst

    def _written(self, computation: Computation, shapes: tuple[Shape, ...]) -> list[int]:
        """Return the bytes that a fused computation writes of each result: only the update if it writes in place.

        `shapes` are the fusion's results. If they do not match the root's elements, each is written whole.
        """
        root = computation.root
        roots = [computation.by_name.get(name) for name in root.operands] if root.opcode == "tuple" else [root]
        if len(roots) != len(shapes):
            return [shape.padded_bytes for shape in shapes]
        return [
            self._update(computation, source) if source is not None else shape.padded_bytes
            for shape, source in zip(shapes, roots, strict=True)
        ]

    def _update(self, computation: Computation, op: Instruction) -> int:
        """Return the bytes written for a result `op` of a fused computation: only its updates if a parameter stores it.
        The rows of a scatter are read too.

        A returned parameter writes 0 bytes, and any other value is written whole. It has the layout of the result: a
        value that the kernel only reshapes is not in memory.
        """
        whole = op.padded_bytes
        while op.opcode in ("bitcast", "reshape") and op.operands[0] in computation.by_name:
            op = computation.by_name[op.operands[0]]
        if op.opcode in ("dynamic-update-slice", "scatter") and len(op.shapes) == 1:
            updated, update = (computation.by_name.get(op.operands[n]) for n in (0, _UPDATE[op.opcode]))
            # A value that the fusion computes is written whole, and its updates again.
            if updated is not None and op.opcode == "scatter":
                return self._update(computation, updated) + 2 * self._rows(computation, op)
            if updated is not None and update is not None:
                return min(op.padded_bytes, self._update(computation, updated) + update.padded_bytes)
        if op.opcode == "parameter":
            return 0  # returned unchanged
        if op.opcode == "fusion":
            inner = self.module.computations.get(_called(op))
            if inner is not None and inner.root.opcode != "tuple":
                # A nested scatter into zeros that the same fusion fills writes the zeros too.
                base = _base(inner)
                outer = computation.by_name.get(op.operands[base]) if base is not None else None
                filled = self._update(computation, outer) if outer is not None else 0
                return filled + self._update(inner, inner.root)
        return whole


_MOVES = frozenset({"transpose", "copy", "reverse", "concatenate", "pad"})
"""Opcodes that read an element of an operand once for each element of the result that is made of it."""
_WHOLE = frozenset({"dot", "convolution", "custom-call", "scatter", "gather", "fusion", "sort"})
"""Opcodes whose results may have the dims of an operand, but need more than one element of it for each."""


def _keeps_elements(computation: Computation, op: Instruction, operand: str) -> bool:
    """Return True if each element of an op's only result needs at most one element of an operand."""
    source = computation.by_name.get(operand)
    if source is None or len(op.shapes) != 1 or op.opcode in _WHOLE or op.called:
        return False
    return op.opcode in _MOVES or op.shapes[0].dims == source.shapes[0].dims


def _base(computation: Computation) -> int | None:
    """Return the number of the parameter that a fused computation's result updates in place; None without one."""
    op: Instruction | None = computation.root
    while op is not None and op.opcode in ("bitcast", "reshape", *_UPDATE):
        op = computation.by_name.get(op.operands[0])
    return next((number for number, parameter in computation.parameters.items() if parameter is op), None)


def _hands_on(computation: Computation, number: int) -> bool:
    """Return True if a fused computation returns parameter `number` as its only result, perhaps reshaped."""
    op: Instruction | None = computation.root
    while op is not None and op.opcode in ("bitcast", "reshape"):
        op = computation.by_name.get(op.operands[0])
    return op is not None and op is computation.parameters.get(number)


def _called(op: Instruction) -> str:
    """Return the name of the computation that an instruction calls, "" without one."""
    return (op.attribute("calls") or op.attribute("to_apply") or "").lstrip("%")


def _library_call(owner: Computation, op: Instruction) -> Matmul | None:
    """Return the matmul of a call to cuBLAS, or of a convolution of cuDNN; None for any other call.

    None too if the shapes of two operands are unknown. A triangular solve counts as a product with the whole matrix.
    """
    target = re.search(r'custom_call_target="__(cublas|cudnn\$conv)([$\w]*)"', op.attributes)
    sides = [owner.by_name[name].shapes[0] for name in op.operands[:2] if name in owner.by_name]
    if target is None or len(sides) < 2 or not op.shapes:
        return None
    left, right = sides
    if target[2].startswith("$triangularSolve"):
        # A triangular solve is as slow as a product with the whole matrix: half of it is zeros, but rows wait for one
        # another.
        rank = len(left.dims)
        return _product(left, right, [rank - 1], list(range(rank - 2)), 1)
    if target[1] == "cublas":
        dims = {
            key: _numbers((re.search(rf'"{key}_dimensions":\[([^\]]*)\]', op.attributes) or ["", ""])[1])
            for key in ("lhs_contracting", "lhs_batch")
        }
        return _product(left, right, dims["lhs_contracting"], dims["lhs_batch"], 1)
    # The labels belong to the forward convolution; the call of a gradient computes one of its operands.
    if "BackwardInput" in target[2]:
        return _convolution(op, op.shapes[0], right, left, 1)
    if "BackwardFilter" in target[2]:
        return _convolution(op, left, op.shapes[0], right, 1)
    return _convolution(op, left, right, op.shapes[0], 1)


def _matmul(owner: Computation, op: Instruction) -> Matmul:
    """Return the matmul of a dot or a convolution; 32 and 64-bit floats need 3 passes at precision high and 6 at
    highest.
    """
    left, right = (owner.by_name[name].shapes[0] for name in op.operands[:2])
    precision = op.attribute("operand_precision") or ""
    # The matrix unit multiplies bf16: parts of the floats are multiplied in three or six combinations.
    passes = 6 if "highest" in precision else 3 if "high" in precision else 1
    if left.dtype not in ("f32", "f64"):
        passes = 1
    if op.opcode == "dot":
        contracted, batch = (_numbers(op.attribute(f"lhs_{which}_dims")) for which in ("contracting", "batch"))
        return _product(left, right, contracted, batch, passes)
    return _convolution(op, left, right, op.shapes[0], passes)


def _product(left: Shape, right: Shape, contracting: list[int], batches: list[int], passes: int) -> Matmul:
    """Return the matmul of a product of two arrays.

    - `contracting`, `batches`: contracting and batch dims of the left array; the right one has dims of the same sizes.
    - `passes`: as in `Matmul`.
    """
    contracted, batch = (math.prod(left.dims[d] for d in dims) for dims in (contracting, batches))
    m = math.prod(left.dims) // max(1, contracted * batch)
    n = math.prod(right.dims) // max(1, contracted * batch)
    return Matmul(m, n, contracted, 2.0 * batch * m * n * contracted, left.dtype, passes)


def _numbers(text: str | None) -> list[int]:
    """Return the whole numbers in a text, in order; empty for None."""
    return [int(number) for number in re.findall(r"\d+", text or "")]


def _convolution(op: Instruction, left: Shape, right: Shape, result: Shape, passes: int) -> Matmul:
    """Return a convolution as a matmul, with FLOPs as XLA counts them; 0 FLOPs without `dim_labels`.

    `left`, `right` and `result` are the images, the kernel and the output of the forward convolution.

    Only pairs of a kernel element and an input element count. TPU programs express batched matmuls as convolutions with
    a dilated or strided window, so that each batch is multiplied with itself only. The whole window would overcount by
    the batch size.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    if labels is None:
        return Matmul(1, 1, 1, 0.0, left.dtype, passes)
    inputs, kernel, outputs = labels[1], labels[2], labels[3]
    window = _window(op.attribute("window") or "{}")
    spatial = [label for label in outputs if label.isdigit()]
    meetings = 1
    for label in spatial:
        number = int(label)
        meetings *= _meetings(
            left.dims[inputs.index(label)],
            right.dims[kernel.index(label)],
            result.dims[outputs.index(label)],
            *(window[key][number] if number < len(window[key]) else default for key, default in _WINDOW),
        )
    batch = result.dims[outputs.index("b")]
    features = result.dims[outputs.index("f")]
    k = right.dims[kernel.index("i")]
    groups = int(op.attribute("batch_group_count") or 1)
    # One multiplication and one addition for each pair, example, output feature and input feature. Groups share out the
    # examples.
    flops = 2.0 * meetings * batch * features * k / groups
    places = math.prod(result.dims[outputs.index(label)] for label in spatial)
    # The contracted part of the window counts to k; the part that stands for a batch counts to no dim.
    depth = max(1, round(meetings / places)) if places else 1
    rows = max(1, batch * places)
    return Matmul(rows, features, k * depth, flops, left.dtype, passes)


_WINDOW = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
"""Field of a convolution's window, with its default."""


def _window(text: str) -> dict[str, list[int]]:
    """Parse the window of a convolution: one number for each spatial dim, the low one of a padding; empty lists for
    fields left out.
    """
    window: dict[str, list[int]] = {"stride": [], "pad": [], "lhs_dilate": [], "rhs_dilate": []}
    for key, value in re.findall(r"(\w+)=([\d_x\-]+)", text):
        if key in window:
            window[key] = [int(part.split("_")[0]) for part in value.split("x")]
    return window


@functools.lru_cache(maxsize=4096)
def _meetings(size: int, kernel: int, out: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Count the pairs (output place, kernel element) that read an input element, along one spatial dim.

    - `size`, `kernel`, `out`: elements of input, kernel and output.
    - `stride`, `pad`: stride of the window, and padding before the input.
    - `lhs_dilate`, `rhs_dilate`: spacing of input elements and of kernel elements.
    """
    import numpy as np

    if kernel == 1 and pad == 0 and lhs_dilate == 1:
        return out
    at = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * rhs_dilate - pad
    return int(((at % lhs_dilate == 0) & (at >= 0) & (at < (size - 1) * lhs_dilate + 1)).sum())
