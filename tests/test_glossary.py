"""One word for one thing: names in the code, and docstrings that a stranger can read."""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
from collections.abc import Iterator

import autoshard
from autoshard import cost, exports, planning, program, report, serving, solver, validation
from autoshard import exec as execution


ROOT = pathlib.Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
ROOMS = (cost, planning, program, solver, execution, report, exports, serving, validation)


@functools.cache
def banned() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return for each banned word the better word and the rooms where it is banned (empty: everywhere)."""
    words = {}
    for line in GLOSSARY.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3:
            for word, where in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", cells[2]):
                words[word] = (cells[0], tuple(part.strip() for part in where.split(",")) if where else ())
    return words


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every function, class, parameter, variable and attribute that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def uses(path: str, text: str) -> list[str]:
    """Return a sentence for each name in a module that is a banned word or contains one."""
    sentences = []
    own = [(1, pathlib.PurePath(path).stem), *names(ast.parse(text))]
    for line, name in own:
        parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}
        for word, (better, where) in banned().items():
            hit = word in name.lower() if "_" in word else word in parts
            if hit and (not where or any(f"autoshard/{room}/" in path for room in where)):
                sentences.append(f"{path}:{line}: {name} says {word!r}; the word is {better!r}")
    return sentences


def test_the_glossary_bans_words():
    found = banned()
    assert {"dimension", "passage", "heavy_states", "nbytes"} <= found.keys()
    assert found["refinement"] == ("axis parts", ("planning", "cost", "graph", "solver"))


def test_planted_names_are_found():
    planted = "class Passage:\n    num_dimensions = 1\n\ndef refinement_of(mem): ...\n"
    assert len(uses("autoshard/planning/price/_x.py", planted)) == 4
    assert len(uses("autoshard/exec/learn/_x.py", planted)) == 3  # refining is that shelf's purpose
    assert uses("autoshard/planning/_dimension.py", "") and not uses(
        "autoshard/planning/_x.py", "memory = remember = 1\n"
    )


def test_no_name_is_a_banned_word():
    found = [
        line
        for file in sorted((ROOT / "autoshard").rglob("*.py"))
        for line in uses(str(file.relative_to(ROOT)), file.read_text())
    ]
    assert not found, "\n".join(found)


def public_classes() -> list[type]:
    """List the dataclasses that users receive: of the package and of the rooms' public names."""
    classes = {
        value
        for module in (autoshard, *ROOMS)
        for name in (getattr(module, "__all__", None) or dir(module))
        if not name.startswith("_") and isinstance(value := getattr(module, name), type)
        if dataclasses.is_dataclass(value) and value.__module__.startswith("autoshard")
    }
    return sorted(classes, key=lambda each: each.__qualname__)


def written(cls: type) -> ast.ClassDef:
    (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return tree


def field_docs(tree: ast.ClassDef) -> dict[str, str]:
    """Return the strings below the fields of a class."""
    docs = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                docs[field.target.id] = inspect.cleandoc(text.value.value)
    return docs


def test_what_stands_below_a_field_is_a_sentence():
    classes = public_classes()
    assert len(classes) >= 20
    wrong = [
        f"{cls.__qualname__}.{name}: {text!r}"
        for cls in classes
        for name, text in field_docs(written(cls)).items()
        if not (text.endswith((".", ")", "`")) and (text[0].isupper() or text[0] in "`[(") and len(text.split()) >= 5)
    ]
    assert not wrong, "\n".join(wrong)


HALVES = ("Of ", "With ", "Without ", "Until ", "Both.", "Those ", "The same", "It was ", "By ")
"""Beginnings of half sentences, which make sense only to readers who know the field."""


def all_field_docs() -> Iterator[tuple[str, str]]:
    """Return place and text of the string below every field of the package, also of private classes."""
    for file in sorted((ROOT / "autoshard").rglob("*.py")):
        for cls in ast.walk(ast.parse(file.read_text())):
            if isinstance(cls, ast.ClassDef):
                for name, text in field_docs(cls).items():
                    yield f"{file.relative_to(ROOT)}: {cls.name}.{name}", text


def half(text: str) -> bool:
    """Return True if a field's string lacks its subject. A bare shape or unit (`[times]`) is enough."""
    words = len(text.split())
    return text.startswith(HALVES) or (words < 3 and text[0] not in "[(`")


def test_nothing_below_a_field_is_half_a_sentence():
    docs = dict(all_field_docs())
    assert len(docs) > 600
    assert half("Until it is pickled.") and half("Elementwise operations.") and not half("[times]")
    found = [f"{place}: {text!r}" for place, text in docs.items() if half(text)]
    assert not found, "\n".join(found)


def public_functions() -> list[tuple[str, ast.FunctionDef]]:
    """List the public functions of the package and the rooms, and methods of their classes, as syntax trees."""
    functions: dict[str, ast.FunctionDef] = {}
    for module in (autoshard, *ROOMS):
        for name in dir(module):
            value = inspect.unwrap(getattr(module, name))
            ours = inspect.isfunction(value) or isinstance(value, type)
            if name.startswith("_") or not ours or not value.__module__.startswith("autoshard"):
                continue
            (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(value))).body
            written = [tree] if isinstance(tree, ast.FunctionDef) else getattr(tree, "body", [])
            for each in written:
                if isinstance(each, ast.FunctionDef) and (each is tree or not each.name.startswith("_")):
                    functions[f"{value.__module__}.{name}" + f".{each.name}" * (each is not tree)] = each
    return sorted(functions.items())


RAISED = ("UserError", "InfeasibleError", "TypeError", "ValueError", "KeyError", "IndexError")


def raised(tree: ast.FunctionDef) -> set[str]:
    """Return the names of the errors that a function raises itself."""
    errors = set()
    for node in ast.walk(tree):
        error = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
        error = node.exc if isinstance(node, ast.Raise) and error is None else error
        if isinstance(error, ast.Name):
            errors.add(error.id)
    return errors & set(RAISED)


def silent(name: str, tree: ast.FunctionDef) -> list[str]:
    """Return a sentence for each error that a function raises and its docstring does not name."""
    return [f"{name} raises {error}" for error in sorted(raised(tree)) if error not in (ast.get_docstring(tree) or "")]


def test_a_planted_error_is_found():
    (tree,) = ast.parse('def f():\n    """Nothing."""\n    raise UserError("x")\n').body
    assert isinstance(tree, ast.FunctionDef) and silent("f", tree) == ["f raises UserError"]
    (tree,) = ast.parse('def f():\n    """Raises `TypeError`."""\n    raise TypeError\n').body
    assert isinstance(tree, ast.FunctionDef) and raised(tree) == {"TypeError"} and not silent("f", tree)


def test_public_functions_say_what_they_raise():
    functions = public_functions()
    assert len(functions) >= 200
    found = [line for name, tree in functions for line in silent(name, tree)]
    assert not found, "\n".join(found)


def test_public_functions_have_docstrings():
    found = [name for name, tree in public_functions() if ast.get_docstring(tree) is None]
    assert not found, "\n".join(found)
