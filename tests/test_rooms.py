"""The rooms import upwards only; start-up stays light; every third party is declared."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autoshard"

ROOMS = ("mlir", "program", "graph", "cost", "solver", "plan", "exec", "report", "cli")
"""Top to bottom: a room may import those before it."""

SHARED = ("crew", "errors", "files", "helper", "kept", "kernels", "process", "rules", "units")
"""Imported by every room; they import none."""

DOORS = ("autoload", "torch_xla")
"""Modules that others load by name; no room imports them."""

MLIR_ROOM = "mlir"


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module's source imports, wherever in it that stands.

    `from a import b` gives `a.b`: whether `b` is a module or a name in one makes no difference to the rules.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                parts = package[: len(package) - level + 1] if level else []
                prefix = ".".join([*parts, *([base] if base else [])])
                yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def room_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "autoshard" and len(parts) > 1 else None


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """One sentence for every import in `source` that the rules forbid."""
    room = room_of(module)
    found = []
    for line, name in imports_of(source, module, is_package):
        where = f"{module}:{line} imports {name}"
        if name.split(".")[:2] == ["jaxlib", "mlir"] and room != MLIR_ROOM:
            found.append(f"{where}, but only {MLIR_ROOM} may touch jaxlib's MLIR bindings")
        target = room_of(name)
        if target is None or target == room or target in SHARED or target == "__version__":
            continue
        if room in SHARED:
            found.append(f"{where}, but {room} is shared by all rooms and imports none")
        elif room == "solver":
            found.append(f"{where}, but solver imports no other room")
        elif room in ROOMS and (target not in ROOMS or ROOMS.index(target) > ROOMS.index(room)):
            found.append(f"{where}, but {target} is not above {room}")
    return found


def package_modules() -> Iterator[tuple[Path, str, bool]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_rooms_import_upwards_only():
    modules = list(package_modules())
    assert {room_of(module) for _, module, _ in modules} >= {*ROOMS, *SHARED}
    wrong = [
        message
        for path, module, is_package in modules
        for message in wrong_imports(path.read_text(), module, is_package)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_belongs_to_a_room():
    known = {*ROOMS, *SHARED, *DOORS, "__main__", None}
    assert {room_of(module) for _, module, _ in package_modules()} <= known


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("autoshard.cost._chips", "import autoshard.plan", "plan is not above cost"),
        ("autoshard.cost._chips", "from autoshard import exec", "exec is not above cost"),
        ("autoshard.program._jax", "def f():\n    from autoshard.graph import OpGraph", ":2 imports"),
        ("autoshard.graph._ops", "def f():\n    if x:\n        import autoshard.cost._chips", ":3 imports"),
        ("autoshard.graph._ops", "from ..cost import Chip", "autoshard.cost.Chip, but cost is not above graph"),
        ("autoshard.graph._ops", "from .. import cost", "cost is not above graph"),
        ("autoshard.plan._x", "import importlib\nimportlib.import_module('autoshard.exec')", "exec is not above plan"),
        ("autoshard.plan._x", "if TYPE_CHECKING:\n    from autoshard.report import r", "report is not above plan"),
        ("autoshard.plan._x", "from autoshard import Plan", "Plan is not above plan"),
        ("autoshard.solver._ilp", "from autoshard.graph import OpGraph", "solver imports no other room"),
        ("autoshard.exec._run", "from autoshard.cli import main", "cli is not above exec"),
        ("autoshard.units", "from autoshard.plan import Spec", "shared by all rooms and imports none"),
        ("autoshard.plan._x", "from jaxlib.mlir import ir", "only mlir may touch"),
        ("autoshard.exec._x", "def f():\n    from jaxlib import mlir", "only mlir may touch"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, message: str):
    (found,) = wrong_imports(source, module)
    assert message in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("autoshard.plan._x", "from autoshard.cost import Chip\nfrom autoshard.errors import UserError"),
        ("autoshard.solver._ilp", "from autoshard.solver._problem import Problem\nimport autoshard.units"),
        ("autoshard.exec._x", "from autoshard import __version__"),
        ("autoshard.mlir._pins", "from jaxlib.mlir import ir"),
    ],
)
def test_a_right_import_is_allowed(module: str, source: str):
    assert wrong_imports(source, module) == []


HEAVY = ("jax", "jaxlib", "torch", "torchax", "transformers", "ortools", "numba", "numpy", "pandas", "optax", "jinja2")
HEAVY += ("networkx",)


@pytest.mark.parametrize("statement", ["import autoshard", "import autoshard.cli", "from autoshard import UserError"])
def test_start_up_loads_nothing_heavy(statement: str):
    code = f"{statement}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def modules_loaded(code: str) -> int:
    """How many modules Python holds after running `code`: a measure of start-up that a busy machine cannot change."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(len(sys.modules), file=sys.stderr)"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(out.stderr.split()[-1])


def test_start_up_loads_few_modules():
    """The whole import stays near what argparse and json need by themselves."""
    plain = modules_loaded("import argparse, contextlib, difflib, json, os, pathlib, dataclasses, importlib")
    assert modules_loaded("import autoshard") < plain + 30
    show_help = "from autoshard.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert modules_loaded(show_help) < plain + 60


INDIRECT = {"flatbuffers"}
"""Imported for us by what we import, which does not require it itself."""


def distribution(requirement: str) -> str:
    (name,) = re.findall(r"^[A-Za-z0-9_.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()


def test_third_parties_are_declared_and_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {distribution(r) for r in project["dependencies"]}
    optional = {distribution(r) for extra in project["optional-dependencies"].values() for r in extra}
    owners = importlib.metadata.packages_distributions()
    used: dict[str, str] = {}
    for path, module, is_package in package_modules():
        for line, name in imports_of(path.read_text(), module, is_package):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top != "autoshard":
                for owner in owners.get(top, [top]):
                    used.setdefault(distribution(owner), f"{module}:{line}")
    used.pop("jaxlib", None)  # comes with jax, of one version
    undeclared = {name: where for name, where in used.items() if name not in required | optional}
    assert not undeclared
    assert not required - set(used) - INDIRECT, "declared, but imported nowhere"
