"""Small changes of a program's text, for `mutants.py`: one expression of one file at a time."""

import ast
import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any


SEED = "autoshard"
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed expression."""

    room: str
    path: str
    """Path of the file below the package."""
    function: str
    line: int
    before: str
    after: str
    span: tuple[int, int]
    """Range of the file's bytes that `after` replaces."""
    number: int
    """Position among equal changes of one function."""

    @property
    def key(self) -> str:
        return f"{self.path}:{self.function}: {self.before} -> {self.after} #{self.number}"

    def source(self, text: bytes) -> bytes:
        return text[: self.span[0]] + f"({self.after})".encode() + text[self.span[1] :]


def drawn(package: Path, room: str, count: int) -> list[Mutant]:
    """Return `count` mutants of a room; changes of the package elsewhere leave the draw unchanged."""
    known = [mutant for path in (package / room).rglob("*.py") for mutant in mutants(package, room, path)]
    return sorted(known, key=lambda mutant: hashlib.sha256(f"{SEED} {mutant.key}".encode()).hexdigest())[:count]


def mutants(package: Path, room: str, path: Path) -> Iterator[Mutant]:
    """Yield every change of a file."""
    source = path.read_bytes()
    starts = list(itertools.accumulate(map(len, source.splitlines(keepends=True)), initial=0))
    seen: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for function, node in _nodes(ast.parse(source), ""):
        for after in _changes(node):
            span = (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)
            before, changed = ast.unparse(node), ast.unparse(after)
            number = seen[function, before, changed]
            seen[function, before, changed] += 1
            below = str(path.relative_to(package))
            yield Mutant(room, below, function, node.lineno, before, changed, span, number)


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[str, Any]]:
    """Yield the expressions that a run computes, with their function: no annotations, texts or error messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                continue
            if isinstance(child, ast.If | ast.IfExp) and "TYPE_CHECKING" not in ast.unparse(child.test):
                # This node stands for the whole branch, which a false condition disables.
                yield function, ast.copy_location(ast.Expr(child.test), child.test)
            if isinstance(child, ast.expr):
                yield function, child
            yield from _nodes(child, f"{function}.{child.name}".lstrip(".") if isinstance(child, NAMED) else function)


def _changes(node: Any) -> Iterator[ast.AST]:
    match node:
        case ast.Expr():
            yield ast.Constant(False)
        case ast.Compare(left=left, ops=[op, *rest]):
            yield ast.Compare(left, [COMPARISONS[type(op)](), *rest], node.comparators)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS and not _is_text(left, right):
            yield ast.BinOp(left, SIGNS[type(op)](), right)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield ast.Constant(value + 1)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield ast.Call(ast.Name("max" if name == "min" else "min"), node.args, node.keywords)


def _is_text(*nodes: ast.expr) -> bool:
    """Return True for a sum of texts or lists, whose difference only raises."""
    return any(isinstance(n, ast.JoinedStr | ast.List) or isinstance(getattr(n, "value", 0), str) for n in nodes)
