"""The rooms import upwards only, start-up loads few modules, and every third-party package is declared."""

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autoshard"

ROOMS = (
    *("mlir", "program", "graph", "cost", "solver", "planning", "exec", "report", "exports"),
    *("serving", "degrees", "reinforcement", "validation", "cli"),
)
"""Rooms from top to bottom: a room may import those before it."""

RIM = ("serving", "degrees", "reinforcement", "validation")
"""Rooms outside of the product: only the command and one another import them."""

SHELVES = {
    "program": (
        (
            "program_record",
            "argument_names",
            "batch_dims",
            "caller_frames",
            "model_flops",
            "registered_rules",
            "segments",
        ),
        ("remat_marks", "remat_policy"),
        ("platforms", "example_values", "roles", "source_choices", "kernels"),
        ("opaque_functions", "torch_ops"),
        ("lowering", "moe"),
        ("jax",),
        ("torch", "config_files", "artifact", "configs"),
        ("trace_cache", "hf"),
        ("load",),
    ),
    "graph": (
        ("records",),
        ("clusters", "flops", "op_classes"),
        ("extraction",),
        ("memory",),
        ("read_module",),
        ("graph_cache",),
    ),
    "planning": (
        ("record",),
        ("xla",),
        ("space",),
        ("price",),
        ("solve", "stages"),
        ("mesh", "forms"),
        ("explain", "warm_planner", "mesh_choice"),
        ("plan_builder",),
        ("recipes",),
        ("planning_call", "capacity"),
    ),
    "exec": (("devices", "hlo"), ("torch_xla_hook",), ("dtensor",), ("apply",), ("run",), ("ahead",), ("learn",)),
    "report": (("display", "figures", "schedule_picture"), ("terminal",), ("page",), ("drawing",)),
}
"""Shelves of each room by level, in the order of the data flow. A shelf may import shelves of the levels before its
own, and of its own level only itself.
"""

SHARED = ("base", "errors")
"""Modules that every room imports; they import none."""

DOORS = ("autoload", "torch_xla")
"""Modules that others load by name; no room imports them."""

MLIR_ROOM = "mlir"


HOOK = "autoshard.base.providers"
"""The one module whose texts may name later modules: a plan's methods load them there when they are called."""


def module_in(text: str) -> str | None:
    """Return the module of a room that a text names, like the texts in registries and helper processes."""
    named = re.fullmatch(r"(autoshard(?:\.\w+)+)(?::\w+)?", text)
    if named is None or room_of(named[1]) not in ROOMS:
        return None
    path = ROOT.joinpath(*named[1].split("."))
    return named[1] if path.is_dir() or path.with_suffix(".py").is_file() else None


@functools.cache
def imports_of(source: str, module: str, is_package: bool) -> list[tuple[int, str]]:
    """Return line and dotted name of everything that a module's source imports, at any place.

    `from a import b` gives `a.b`, both for a module `b` and for a name in `a`.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                parts = package[: len(package) - level + 1] if level else []
                prefix = ".".join([*parts, *([base] if base else [])])
                found += ((node.lineno, f"{prefix}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.append((node.lineno, name))
            case ast.Constant(value=str(text)) if module != HOOK and (named := module_in(text)):
                found.append((node.lineno, named))
    return found


def room_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "autoshard" and len(parts) > 1 else None


def shelf_of(name: str) -> tuple[str, str] | None:
    """Return room and shelf of a dotted name; None in a room without shelves."""
    parts = name.split(".")
    room = room_of(name)
    return (room, parts[2]) if room in SHELVES and len(parts) > 2 else None


def level_of(room: str, shelf: str) -> int | None:
    """Return the position of a shelf's level; None if the name is no shelf, such as a name that the room exports."""
    return next((number for number, level in enumerate(SHELVES[room]) if shelf in level), None)


def wrong_shelf(module: str, name: str) -> str:
    """Return the reason why a module may not import a name of its own room; empty if it may."""
    own, other = shelf_of(module), shelf_of(name)
    if own is None or own[0] != room_of(name) or own == other:
        return ""
    mine = level_of(*own)
    theirs = None if other is None else level_of(*other)
    if mine is None:
        return f"{own[1]} is no shelf of {own[0]}"
    if theirs is None:
        return f"the names that {own[0]} offers are for other rooms"
    return "" if theirs < mine else f"{other and other[1]} is not before {own[1]}"


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return a sentence for every import in `source` that the rules forbid."""
    room = room_of(module)
    sentences = []
    for line, name in dict.fromkeys(imports_of(source, module, is_package)):
        where = f"{module}:{line} imports {name}"
        if name.split(".")[:2] == ["jaxlib", "mlir"] and room != MLIR_ROOM:
            sentences.append(f"{where}, but only {MLIR_ROOM} may touch jaxlib's MLIR bindings")
        if unordered := wrong_shelf(module, name):
            sentences.append(f"{where}, but {unordered}")
        target = room_of(name)
        if target is None or target == room or target in SHARED or target == "__version__":
            continue
        if room in SHARED:
            sentences.append(f"{where}, but {room} is shared by all rooms and imports none")
        elif room == "solver":
            sentences.append(f"{where}, but solver imports no other room")
        elif target in RIM and room not in (*RIM, "cli"):
            sentences.append(f"{where}, but {target} stands beside the product")
        elif room in ROOMS and (target not in ROOMS or ROOMS.index(target) > ROOMS.index(room)):
            sentences.append(f"{where}, but {target} is not above {room}")
    return sentences


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


def imported_modules(module: str, source: str, is_package: bool, known: set[str]) -> set[str]:
    """Return the modules of the package that a module imports. Names that a package defines count as that package."""
    names = {name for _, name in imports_of(source, module, is_package)}
    return {name if name in known else name.rpartition(".")[0] for name in names} & known - {module}


def test_no_modules_import_one_another():
    modules = list(package_modules())
    known = {module for _, module, _ in modules} - {"autoshard"}  # the package's `__init__` loads rooms on request
    graph = networkx.DiGraph(
        (module, other)
        for path, module, is_package in modules
        for other in imported_modules(module, path.read_text(), is_package, known)
    )
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
    assert not circles
    assert graph.number_of_edges() > 500


MOST_LEVELS = {"graph": 6}


def test_every_shelf_is_there_and_drawn():
    for room, levels in SHELVES.items():
        drawn = {shelf for level in levels for shelf in level}
        there = {path.stem for path in (PACKAGE / room).iterdir() if path.is_dir() or path.suffix == ".py"}
        assert there - {"__init__", "__pycache__"} == drawn
        assert len(levels) <= MOST_LEVELS.get(room, 10)


def test_every_module_belongs_to_a_room():
    known = {*ROOMS, *SHARED, *DOORS, "__main__", None}
    assert {room_of(module) for _, module, _ in package_modules()} <= known


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("autoshard.cost._chips", "import autoshard.planning", "planning is not above cost"),
        ("autoshard.cost._chips", "from autoshard import exec", "exec is not above cost"),
        ("autoshard.program._jax", "def f():\n    from autoshard.graph import OpGraph", ":2 imports"),
        ("autoshard.graph._ops", "def f():\n    if x:\n        import autoshard.cost._chips", ":3 imports"),
        ("autoshard.graph._ops", "from ..cost import Chip", "autoshard.cost.Chip, but cost is not above graph"),
        ("autoshard.graph._ops", "from .. import cost", "cost is not above graph"),
        (
            "autoshard.planning.explain._x",
            "import importlib\nimportlib.import_module('autoshard.exec')",
            "exec is not above planning",
        ),
        (
            "autoshard.planning.explain._x",
            "if TYPE_CHECKING:\n    from autoshard.report import r",
            "report is not above planning",
        ),
        ("autoshard.planning.explain._x", "from autoshard import Plan", "Plan is not above planning"),
        ("autoshard.solver._ilp", "from autoshard.graph import OpGraph", "solver imports no other room"),
        ("autoshard.exec._run", "from autoshard.cli import main", "cli is not above exec"),
        ("autoshard.base.units", "from autoshard.planning import Spec", "shared by all rooms and imports none"),
        ("autoshard.planning.explain._x", "from jaxlib.mlir import ir", "only mlir may touch"),
        ("autoshard.exec._x", "def f():\n    from jaxlib import mlir", "only mlir may touch"),
        (
            "autoshard.planning.xla._x",
            "from autoshard.planning.price.prediction import Bill",
            "price is not before xla",
        ),
        ("autoshard.planning.forms._x", "import autoshard.planning.mesh.mesh_attempt", "mesh is not before forms"),
        (
            "autoshard.planning.price._x",
            "from autoshard.planning import Plan",
            "names that planning offers are for other rooms",
        ),
        (
            "autoshard.planning.record._x",
            'HOME = "autoshard.planning.explain.explanation"',
            "explain is not before record",
        ),
        ("autoshard.planning.record._x", 'HOME = "autoshard.exec"', "exec is not above planning"),
        (
            "autoshard.planning.price._x",
            'ready("autoshard.planning.warm_planner:ready")',
            "warm_planner is not before price",
        ),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, message: str):
    (found,) = wrong_imports(source, module)
    assert message in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("autoshard.planning.explain._x", "from autoshard.cost import Chip\nfrom autoshard.errors import UserError"),
        ("autoshard.solver._ilp", "from autoshard.solver._problem import Problem\nimport autoshard.base.units"),
        ("autoshard.exec._x", "from autoshard import __version__"),
        ("autoshard.mlir._pins", "from jaxlib.mlir import ir"),
        ("autoshard.planning.price._x", "from autoshard.planning.record.plan_record import Plan"),
        ("autoshard.mlir._x", 'TARGET = "autoshard.call"'),
    ],
)
def test_a_right_import_is_allowed(module: str, source: str):
    assert wrong_imports(source, module) == []


HEAVY = ("jax", "jaxlib", "torch", "torchax", "transformers", "ortools", "numba", "numpy", "pandas", "optax", "jinja2")
HEAVY += ("networkx",)


@pytest.mark.heavy
@pytest.mark.parametrize("statement", ["import autoshard", "import autoshard.cli", "from autoshard import UserError"])
def test_start_up_loads_nothing_heavy(statement: str):
    code = f"{statement}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


@pytest.mark.heavy
def test_what_runs_and_reports_waits_for_the_frameworks_until_it_needs_them():
    code = "import autoshard.exec, autoshard.report, sys; print([m for m in ('jax', 'torch') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def modules_loaded(code: str) -> int:
    """Count the loaded modules after running `code`: a measure of start-up that is independent of the load."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(len(sys.modules), file=sys.stderr)"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(out.stderr.split()[-1])


@pytest.mark.heavy
def test_start_up_loads_few_modules():
    """Compare the import of the package with the modules that argparse and json load."""
    plain = modules_loaded("import argparse, contextlib, difflib, json, os, pathlib, dataclasses, importlib")
    assert modules_loaded("import autoshard") < plain + 30
    show_help = "from autoshard.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert modules_loaded(show_help) < plain + 60


INDIRECT = {"flatbuffers"}
"""Packages that we import without declaring them, since another dependency imports them for us."""


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
    used.pop("jaxlib", None)  # part of jax, at the same version
    undeclared = {name: where for name, where in used.items() if name not in required | optional}
    assert not undeclared
    assert not required - set(used) - INDIRECT, "declared, but imported nowhere"


def test_a_class_name_means_one_thing():
    """Compare classes of all modules: a traceback or a search shows the name alone."""
    homes: dict[str, list[str]] = {}
    for path, module, _ in package_modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert not twice


def long_signatures(source: str) -> list[str]:
    """Return the functions with more than 8 parameters, except for compiled ones, which cannot take objects.

    `self`, `cls` and `**options` do not count.
    """
    signatures = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            compiled = any("njit" in ast.unparse(decorator) for decorator in node.decorator_list)
            if len(names) - (names[:1] in (["self"], ["cls"])) > 8 and not compiled:
                signatures.append(f"{node.name} takes {len(names)}")
    return signatures


def test_a_long_signature_is_found():
    many = ", ".join("abcdefghi")
    assert long_signatures(f"def f({many}): ...") and long_signatures(f"class A:\n    def f(self, {many}): ...")
    assert not long_signatures(f"@njit(cache=True)\ndef f({many}): ...\nclass A:\n    def g(self, b, **c): ...")


MOST_FILES, MOST_LINES = 22, 370
"""Most modules of a folder, and most lines of a module without its docstrings and comments."""

LONG = {
    "autoshard.cli.parser",
    "autoshard.exec.torch_xla_hook.lifecycle.hook_session",
    "autoshard.program.jax.decoder",
    "autoshard.program.torch.scan_pass",
    "autoshard.program.torch.torch_function",
    "autoshard.program.torch.torch_module",
}
"""Files that are still too long."""

LONG_SIGNATURES = {
    "autoshard.exec.learn.refinement: refine takes 9",
    "autoshard.exec.run.measurement: measure takes 10",
    "autoshard.exec.torch_xla_hook.values.device_kernels: native_batch_norm_backward takes 10",
    "autoshard.graph.extraction.graph_builder: append_pass_through takes 11",
    "autoshard.graph.extraction.program_constraints: _read_end takes 10",
    "autoshard.program.jax.decoder: decoder_program takes 27",
    "autoshard.program.jax.trace: trace takes 14",
    "autoshard.program.jax.train_step: training_step takes 9",
    "autoshard.program.kernels.decode_attention: _kernel takes 13",
    "autoshard.program.kernels.decode_attention: _on_shards takes 9",
    "autoshard.program.kernels.dot_attention: attend takes 12",
    "autoshard.program.torch.torch_module: torch_program takes 12",
    "autoshard.program.torch_ops.attention_lowerings: multi_head_attention takes 25",
    "autoshard.program.torch_ops.op_lowerings: embedding_bag takes 11",
    "autoshard.solver.mip_rows: solve_mip takes 9",
    "autoshard.solver.search.engine: __init__ takes 10",
    "autoshard.solver.search.local_search: make_stage takes 9",
    "autoshard.solver.solve_problem: __init__ takes 10",
    "autoshard.solver.solve_problem: solve takes 10",
}
"""Signatures that are still too long, and kernels whose parameters torch or Pallas sets."""


def test_folders_and_files_are_short():
    sources = {module: path for path, module, _ in package_modules()}
    folders = Counter(path.parent for path in sources.values())
    assert not {str(folder) for folder, files in folders.items() if files > MOST_FILES}
    long = {module for module, path in sources.items() if code_lines(path.read_text()) > MOST_LINES}
    assert long == LONG, "a file that is no longer too long leaves the list"


def code_lines(text: str) -> int:
    """Count the lines of a module without docstrings, strings below fields, and comments."""
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(text)))
    statements = (each for body in bodies if isinstance(body, list) for each in body)
    strings = [
        each
        for each in statements
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
    ]
    prose = sum((each.end_lineno or each.lineno) - each.lineno + 1 for each in strings)
    return text.count("\n") - prose - sum(line.lstrip().startswith("#") for line in text.splitlines())


def test_a_base_name_stands_once():
    """Check the base names: the file in a traceback's line is then unique."""
    names = Counter(path.stem for path, _, is_package in package_modules() if not is_package)
    assert not {name for name, number in names.items() if number > 1}
    assert not [name for name in names if name.startswith("_") and name != "__main__"]


def test_no_module_hides_a_name_that_its_folder_offers():
    """Compare names: importing a submodule binds it as an attribute of its folder."""
    for path, module, is_package in package_modules():
        if is_package:
            tree = ast.walk(ast.parse(path.read_text()))
            offered = {alias.asname for node in tree if isinstance(node, ast.ImportFrom) for alias in node.names}
            files = {each.stem for each in path.parent.glob("*.py")}
            folders = {each.parent.name for each in path.parent.glob("*/__init__.py")}
            assert not offered & (files | folders), module


def test_signatures_are_short():
    wrong = {f"{module}: {one}" for path, module, _ in package_modules() for one in long_signatures(path.read_text())}
    assert wrong == LONG_SIGNATURES, "a signature that is no longer too long leaves the list"
