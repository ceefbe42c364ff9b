"""Batch norms as the ops they are made of.

XLA expands them too, but only after it has partitioned the program: it gathers a split operand whole first (seen for
every dim on eight CPU devices), where the sums and products it then makes could have been split.
"""

import math
import re
from typing import Any

from autoshard.mlir._module import collect, main_block, parse_module, replace_by_block


_NORMS = frozenset({"stablehlo.batch_norm_training", "stablehlo.batch_norm_grad", "stablehlo.batch_norm_inference"})
_ROUGH = frozenset({"bf16", "f16"})
"""Types whose sums are made in f32."""


def expand_norms(module: Any) -> None:
    """Replace every batch norm of the module by elementary ops, as StableHLO's specification defines it (in place)."""
    from jaxlib.mlir import ir

    for op in collect(module.operation, _NORMS):
        donor = parse_module(_Expansion(op).text(), module.context)
        block = main_block(donor)
        for each in block.operations:

            def place(inner: Any, location: Any = op.location) -> Any:
                inner.location = location
                return ir.WalkResult.ADVANCE

            each.operation.walk(place, ir.WalkOrder.PRE_ORDER)
        replace_by_block(op, block)


class _Expansion:
    """The text of a function with an op's operands and results."""

    def __init__(self, op: Any) -> None:
        from jaxlib.mlir import ir

        self.kind = op.name.rpartition("batch_norm_")[2]
        self.takes = [str(value.type) for value in op.operands]
        self.gives = [str(value.type) for value in op.results]
        shape = list(ir.RankedTensorType(op.operands[0].type).shape)
        self.feature = ir.IntegerAttr(op.attributes["feature_index"]).value
        self.epsilon = ir.FloatAttr(op.attributes["epsilon"]).value
        element = str(ir.RankedTensorType(op.operands[0].type).element_type)
        self.element = "f32" if element in _ROUGH else element
        self.whole = f"tensor<{'x'.join(map(str, shape))}x{self.element}>"
        self.row = f"tensor<{shape[self.feature]}x{self.element}>"
        self.others = [d for d in range(len(shape)) if d != self.feature]
        self.count = math.prod(shape[d] for d in self.others)
        self.lines: list[str] = []

    def text(self) -> str:
        arguments = [f"%a{k}" for k in range(len(self.takes))]
        values = [self.as_type(a, old, self.wide(old)) for a, old in zip(arguments, self.takes, strict=True)]
        results = getattr(self, self.kind)(*values)
        results = [self.as_type(r, self.wide(new), new) for r, new in zip(results, self.gives, strict=True)]
        signature = ", ".join(f"{a}: {kind}" for a, kind in zip(arguments, self.takes, strict=True))
        body = "\n".join(self.lines)
        types = ", ".join(self.gives)
        return f"func.func public @main({signature}) -> ({types}) {{\n{body}\nreturn {', '.join(results)} : {types}\n}}"

    def training(self, x: str, scale: str, offset: str) -> tuple[str, str, str]:
        mean = self.mean(x)
        centred = self.op("subtract", x, self.spread(mean))
        variance = self.mean(self.op("multiply", centred, centred))
        return self.scaled(centred, scale, offset, variance), mean, variance

    def inference(self, x: str, scale: str, offset: str, mean: str, variance: str) -> tuple[str]:
        return (self.scaled(self.op("subtract", x, self.spread(mean)), scale, offset, variance),)

    def grad(self, x: str, scale: str, mean: str, variance: str, g: str) -> tuple[str, str, str]:
        inverse = self.inverse(variance)
        unit = self.op("multiply", self.op("subtract", x, self.spread(mean)), self.spread(inverse))
        of_scale, of_offset = self.sum(self.op("multiply", g, unit)), self.sum(g)
        along = self.op("multiply", unit, self.spread(self.divided(of_scale)))
        rest = self.op("subtract", self.op("subtract", g, self.spread(self.divided(of_offset))), along)
        slope = self.op("multiply", scale, inverse, self.row)
        return self.op("multiply", rest, self.spread(slope)), of_scale, of_offset

    def scaled(self, centred: str, scale: str, offset: str, variance: str) -> str:
        slope = self.op("multiply", scale, self.inverse(variance), self.row)
        return self.op("add", self.op("multiply", centred, self.spread(slope)), self.spread(offset))

    def inverse(self, variance: str) -> str:
        """One over the standard deviation."""
        return self.new(
            f"stablehlo.rsqrt {self.op('add', variance, self.constant(self.epsilon, self.row), self.row)} : {self.row}"
        )

    def mean(self, value: str) -> str:
        return self.divided(self.sum(value))

    def divided(self, row: str) -> str:
        return self.op("divide", row, self.constant(self.count, self.row), self.row)

    def sum(self, value: str) -> str:
        zero = self.constant(0, f"tensor<{self.element}>")
        return self.new(
            f"stablehlo.reduce({value} init: {zero}) applies stablehlo.add across dimensions = {self.others} : "
            f"({self.whole}, tensor<{self.element}>) -> {self.row}"
        )

    def spread(self, row: str) -> str:
        return self.new(f"stablehlo.broadcast_in_dim {row}, dims = [{self.feature}] : ({self.row}) -> {self.whole}")

    def constant(self, number: float, kind: str) -> str:
        return self.new(f"stablehlo.constant dense<{number:.17e}> : {kind}")

    def op(self, name: str, a: str, b: str, kind: str = "") -> str:
        return self.new(f"stablehlo.{name} {a}, {b} : {kind or self.whole}")

    def wide(self, kind: str) -> str:
        """The type in which a tensor of a type is computed with."""
        return re.sub(r"(?<=[x<])[a-z]+\d+(?=>)", self.element, kind)

    def as_type(self, value: str, old: str, new: str) -> str:
        return value if old == new else self.new(f"stablehlo.convert {value} : ({old}) -> {new}")

    def new(self, line: str) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {line}")
        return name
