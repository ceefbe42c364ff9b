"""Opening what a user names on the command line: a program file, or a model configuration."""

import contextlib
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from autoshard.errors import UserError
from autoshard.program._artifact import SUFFIXES, load_artifact
from autoshard.program._program import Program
from autoshard.program._roles import Roles
from autoshard.program._trace import trace
from autoshard.program._traced import open_config, open_file
from autoshard.rules import registrations


def open_source(
    text: str, *, entry: str = "program", roles: Roles | None = None, kept: bool = False, **options: Any
) -> Program:
    """The program that `text` names: `hf:CONFIG` (with its options), a Python file, or a module in a file.

    `roles` says what arguments of a file are for, by the start of their names, where that is guessed wrongly.
    The program remembers what it was opened from (`Program.source`). With `kept`, an `hf:` program or a module in a
    file comes from the cache on disk where it is there: enough to plan it, not to run it.

    Raises `UserError` if `text` names neither, or if `options` are given to a source that takes none.
    """
    said: dict[str, Any] = {key: value for key, value in sorted(options.items()) if value is not None}
    program = _open(text, entry, roles, said, kept)
    if callable(roles):
        return program  # nothing that a file could hold says it again
    if roles is not None:
        said["roles"] = {name: str(role) for name, role in roles.items()}
    return dataclasses.replace(program, source={"program": text, "entry": entry, "options": said})


def _open(text: str, entry: str, roles: Roles | None, options: dict[str, Any], kept: bool) -> Program:
    if text.startswith("hf:"):
        if roles is not None:
            raise UserError(f"`--roles` is for files; the roles of `{text}` are known, so leave it out.")
        trace_config = functools.partial(_trace_config, text[3:], options)
        return open_config(text[3:], options, trace_config) if kept else trace_config()
    path = Path(text)
    given = [key for key, value in options.items() if value is not False]
    if path.suffix == ".py" or path.suffix in SUFFIXES or path.is_file():
        if given:
            flags = ", ".join(f"`--{key.replace('_', '-')}`" for key in given)
            raise UserError(f"{flags} only apply to `hf:CONFIG`; `{text}` says itself what it runs.")
        if path.suffix == ".py":
            return load_program(path, entry, roles)
        load = functools.partial(load_artifact, path, roles=roles)
        return load() if callable(roles) or not kept else open_file(path, roles, load)
    if path.is_dir():
        raise UserError(f"`{text}` is a directory; give the Python file that offers the program.")
    raise UserError(f"`{text}` is neither an existing file nor `hf:CONFIG`; check the path.")


def _trace_config(config: str, options: dict[str, Any]) -> Program:
    from autoshard.program._hf import from_config

    return from_config(config, **options)


def load_rules(path: str | Path) -> None:
    """Run a Python file that calls `autoshard.register_rule`.

    Raises `UserError` if the file is missing, raises, or registers nothing.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(
            f"--rules {path}: there is no such file; give a Python file that calls autoshard.register_rule."
        )
    before = registrations()
    with _beside(file):
        _run(file)
    if registrations() == before:
        raise UserError(
            f'--rules {path} registers no rule; call autoshard.register_rule("target", "b s -> b s") in it.'
        )


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[None]:
    """Lets a file import its neighbours."""
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def load_program(path: str | Path, entry: str = "program", roles: Roles | None = None) -> Program:
    """Run a Python file and take the program it offers under the name `entry`.

    `entry` is a `Program`, or a function without arguments that returns a `Program`, `(fn, args)` for JAX, or
    `(module, example_inputs)` for torch with an optional third dict of keyword inputs. The file may import its
    neighbours. `roles` are those of `trace`, for `(fn, args)` only.

    Raises `UserError` if the file is missing, raises, or offers something else.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file `{path}`; give the path of a Python file that offers `{entry}`.")
    with _beside(file):
        offered = _offered(_run(file), file, entry)
        return _as_program(offered, file, entry, roles)


def _run(file: Path) -> ModuleType:
    name = f"_autoshard_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"`{file}` cannot be loaded as Python; give a file that ends in `.py`.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code runs here
        sys.modules.pop(name, None)
        raise UserError(f"`{file}` raised {_place(error, file)}.") from error
    return module


def _offered(module: ModuleType, file: Path, entry: str) -> Any:
    if hasattr(module, entry):
        return getattr(module, entry)
    names = sorted(
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and (isinstance(value, Program) or (callable(value) and _is_own(value, module)))
    )
    there = ", ".join(f"`{name}`" for name in names) if names else "no function"
    raise UserError(
        f"`{file}` offers no `{entry}`; it has {there}; define `{entry}()` or name another one with --entry."
    )


def _as_program(offered: Any, file: Path, entry: str, roles: Roles | None) -> Program:
    if callable(offered) and not isinstance(offered, Program) and not _is_module(offered):
        try:
            offered = offered()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the user's own code runs here
            raise UserError(f"`{entry}()` in `{file}` raised {_place(error, file)}.") from error
    if isinstance(offered, (tuple, list)) and len(offered) == 2 and callable(offered[0]) and not _is_module(offered[0]):
        return trace(offered[0], offered[1], name=file.stem, roles=roles)
    if roles is not None:
        raise UserError(
            f"`--roles` is for modules in files and for `(function, arguments)`; `{entry}` in `{file}` is neither."
        )
    if isinstance(offered, Program):
        return offered
    if isinstance(offered, (tuple, list)) and len(offered) in (2, 3):
        if _is_module(offered[0]):
            from autoshard.program._torch import from_torch

            kwargs = offered[2] if len(offered) == 3 else {}
            return from_torch(offered[0], offered[1], kwargs, name=file.stem)
    found = (
        f"{type(offered).__name__} of {len(offered)}" if isinstance(offered, (tuple, list)) else type(offered).__name__
    )
    raise UserError(
        f"`{entry}` in `{file}` gave {_article(found)}; expected an autoshard.Program, "
        "`(function, arguments)` for JAX, or `(torch module, example inputs)`."
    )


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_own(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _place(error: BaseException, file: Path) -> str:
    """`ValueError: text (line 12)`, the line being the deepest one inside the user's file."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    step = error.__traceback__
    while step is not None:
        if Path(step.tb_frame.f_code.co_filename).absolute() == file.absolute():
            line = step.tb_lineno
        step = step.tb_next
    reason = str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines()
    text = f"{type(error).__name__}: {reason[0].rstrip('.')}" if reason else type(error).__name__
    return f"{text} (line {line})" if line else text


def _article(text: str) -> str:
    return f"an {text}" if text[:1].lower() in "aeiou" else f"a {text}"
