"""Opening what a user names on the command line: a program file, or a model configuration."""

import contextlib
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from autoshard.base.call_rules import registrations
from autoshard.base.processes import check_addresses
from autoshard.errors import ENDINGS, UserError, reason_of
from autoshard.program.artifact import SUFFIXES, load_artifact
from autoshard.program.jax.host_state import on_host
from autoshard.program.jax.layer_stack import in_stages, pipelined, read_pipeline
from autoshard.program.jax.trace import trace
from autoshard.program.lowering import check_backend
from autoshard.program.program_record import Program
from autoshard.program.roles import Roles
from autoshard.program.source_choices import Choices, checked_choices, choices_of
from autoshard.program.trace_cache import open_config, open_file


def open_source(
    text: str,
    *,
    entry: str = "program",
    roles: Roles | None = None,
    kept: bool = False,
    preferred: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
    **options: Any,
) -> Program:
    """The program that `text` names: `hf:CONFIG` (with its options), a Python file, or a module in a file.

    `roles` says what arguments of a file are for, by the start of their names, where that is guessed wrongly.
    The program remembers what it was opened from (`Program.source`). With `kept`, an `hf:` program or a module in a
    file comes from the cache on disk where it is there: enough to plan it, not to run it. `preferred` are options that
    hold where the source takes them and `options` say nothing else. `recipe` are the arguments of the function in a
    Python file, of those that it leaves to the planner (`read_choices`).

    Raises `UserError` if `text` names neither, if `options` are given to a source that takes none, or if the process is
    limited to less memory than XLA needs.
    """
    check_addresses()
    said: dict[str, Any] = {key: value for key, value in sorted(options.items()) if value is not None}
    program = _open(text, entry, roles, said, kept, preferred or {}, recipe or {})
    if callable(roles):
        return program  # nothing that a file could hold says it again
    if roles is not None:
        said["roles"] = {name: str(role) for name, role in roles.items()}
    more = {"preferred": dict(preferred or {}), "recipe": dict(recipe or {})}
    source = {"program": text, "entry": entry, "options": said} | {key: value for key, value in more.items() if value}
    return dataclasses.replace(program, source=source)


def read_choices(text: str, entry: str = "program") -> Choices:
    """What a Python file leaves to the planner: its `choices`, or those that `autoshard.choices` says of its `entry`.

    Nothing for any other source. The file is run, unless it says nothing of choices. Raises `UserError` as `choices`
    does, and if the file raises.
    """
    file = Path(text)
    if file.suffix != ".py" or not file.is_file() or "choices" not in file.read_text(errors="replace"):
        return {}
    with _beside(file):
        module = _run(file)
        function = getattr(module, entry, None)
        listed = getattr(module, "choices", None)
        if isinstance(listed, Mapping):
            return checked_choices(listed, function, f"`{entry}` in `{file}`")
        return choices_of(function)


def _open(
    text: str,
    entry: str,
    roles: Roles | None,
    options: dict[str, Any],
    kept: bool,
    preferred: Mapping[str, Any],
    recipe: Mapping[str, Any],
) -> Program:
    if text.startswith("hf:"):
        if roles is not None:
            raise UserError(f"`--roles` is for files; the roles of `{text}` are known, so leave it out.")
        options = {**preferred, **options}
        trace_config = functools.partial(_trace_config, text[3:], options)
        return open_config(text[3:], options, trace_config) if kept else trace_config()
    path = Path(text)
    given = [key for key, value in options.items() if value is not False]
    if path.suffix == ".py" or path.suffix in SUFFIXES or path.is_file():
        own = [key for key in given if path.suffix != ".py" or key not in _MODULE_OPTIONS]
        if own:
            raise UserError(f"{_flags(own)} only apply to `hf:CONFIG`; `{text}` says itself what it runs.")
        if path.suffix == ".py":
            return load_program(path, entry, roles, {key: options[key] for key in given}, preferred, recipe)
        load = functools.partial(load_artifact, path, roles=roles)
        return load() if callable(roles) or not kept else open_file(path, roles, load)
    if path.is_dir():
        raise UserError(f"`{text}` is a directory; give the Python file that offers the program.")
    raise UserError(f"`{text}` is neither an existing file nor `hf:CONFIG`; check the path.")


_MODULE_OPTIONS = ("train", "optimizer", "dtype", "param_dtype", "state_dtype", "remat", "attention")
_MODULE_OPTIONS += ("exchange", "microbatches", "experts", "capacity_factor", "imbalance", "host", "stages", "schedule")
_MODULE_OPTIONS += ("gradient_groups",)
"""What a torch module in a Python file takes; `host`, and what says stages, are for JAX functions there as well."""


def _flags(keys: Sequence[str]) -> str:
    return ", ".join(f"`--{key.replace('_', '-')}`" for key in keys)


def config_program(fields: Mapping[str, Any], **options: Any) -> Program:
    """The program of the model whose configuration has these `fields`, with the options that `hf:CONFIG` takes.

    Raises: `UserError` for fields or options that cannot be used.
    """
    from autoshard.program.hf.hf_program import from_config

    return from_config(fields, **options)


def _trace_config(config: str, options: dict[str, Any]) -> Program:
    from autoshard.program.hf.hf_program import from_config

    options = dict(options)
    host = _host_of(options)
    return on_host(from_config(config, **options), host)


def _host_of(options: dict[str, Any]) -> str:
    """What waits in the hosts' memory, taken out of `options`. Raises `UserError` beside stages of a pipeline."""
    host = options.pop("host", "none")
    if host != "none" and (options.get("stages") or 1) > 1:
        raise UserError(
            f"--host {host} updates state in a loop over layers, and layers in {options['stages']} stages stand side "
            "by side; leave out --host, or --stages."
        )
    return host


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


def load_program(
    path: str | Path,
    entry: str = "program",
    roles: Roles | None = None,
    options: Mapping[str, Any] | None = None,
    preferred: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Program:
    """Run a Python file and take the program it offers under the name `entry`.

    `entry` is a `Program`, or a function without arguments that returns a `Program`, `(fn, args)` for JAX, or
    `(module, example_inputs)` for torch with an optional third dict of keyword inputs. A torch module may also stand
    alone, as `entry` or as `model`, beside its example `inputs`. The file may import its neighbours. `roles` are those
    of `trace`, for `(fn, args)` only; `options` those of `from_torch`, for torch modules only: with `train` the step
    minimises the file's `loss`, a function of the output, and of its `targets` if it has any; but for `stages`,
    `microbatches` and `schedule`, which every `stack` of a JAX program takes. `preferred` and `recipe` are those of
    `open_source`.

    Raises `UserError` if the file is missing, raises, or offers something else.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file `{path}`; give the path of a Python file that offers `{entry}`.")
    said = {**(options or {})}
    host = _host_of(said)
    pipeline = read_pipeline(said.get("stages"), said.get("microbatches"), said.get("schedule"))
    with _beside(file), pipelined(pipeline) as stacks:
        module = _run(file)
        offered = _called(_offered(module, file, entry), file, entry, recipe or {})
        pair = _module_and_inputs(offered, module, file)
        if pair is not None:
            _no_roles(roles, file, entry)
            return on_host(_from_torch(pair, module, file, {**(preferred or {}), **said}), host)
        ours = {"stages", "schedule"}
        if pipeline is not None or said.get("microbatches") == 1:
            ours.add("microbatches")
        own = [key for key in said if key not in ours]
        if own:
            raise UserError(
                f"{_flags(own)} only apply to `hf:CONFIG` and to torch modules; `{entry}` in `{file}` says "
                "itself what it runs."
            )
        program = _as_program(offered, file, entry, roles)
        if pipeline is not None and not stacks:
            raise UserError(
                f"`{entry}` in `{file}` has no layers that could be {pipeline.stages} stages: write the loop over them "
                "as `autoshard.stack(layer, stacked_parameters, x)`, or leave --stages out."
            )
        return on_host(in_stages(program, tuple(dict.fromkeys(stacks)), pipeline), host)


def _run(file: Path) -> ModuleType:
    name = f"_autoshard_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"`{file}` cannot be loaded as Python; give a file that ends in `.py`.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ENDINGS:
        raise
    except BaseException as error:  # the user's own code runs here, and may end the process or raise what it likes
        sys.modules.pop(name, None)
        check_backend(error)
        raise UserError(f"`{file}` raised {_place(error, file)}.") from error
    return module


def _offered(module: ModuleType, file: Path, entry: str) -> Any:
    if hasattr(module, entry):
        return getattr(module, entry)
    if entry == "program" and _is_module(getattr(module, "model", None)):
        return module.model
    names = sorted(
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and (isinstance(value, Program) or (callable(value) and _is_own(value, module)))
    )
    there = ", ".join(f"`{name}`" for name in names) if names else "no function"
    raise UserError(
        f"`{file}` offers no `{entry}`; it has {there}; define `{entry}()` or name another one with --entry."
    )


def _called(offered: Any, file: Path, entry: str, recipe: Mapping[str, Any]) -> Any:
    """What a function in the file returns; anything else as it is."""
    if not callable(offered) or isinstance(offered, Program) or _is_module(offered):
        return offered
    try:
        return offered(**recipe)
    except (UserError, *ENDINGS):
        raise
    except BaseException as error:  # the user's own code runs here
        check_backend(error)
        raise UserError(f"`{entry}()` in `{file}` raised {_place(error, file)}.") from error


def _module_and_inputs(offered: Any, module: ModuleType, file: Path) -> tuple[Any, Any, Any] | None:
    """A torch module, its example inputs and keyword inputs; None if something else is offered."""
    if isinstance(offered, (tuple, list)) and len(offered) in (2, 3) and _is_module(offered[0]):
        keywords = offered[2] if len(offered) == 3 else {}
        if not isinstance(keywords, Mapping):
            raise UserError(
                f"the third of what `{file}` offers with its torch module is {_article(type(keywords).__name__)}; "
                "expected a dict of keyword inputs."
            )
        return offered[0], offered[1], keywords
    if not _is_module(offered):
        return None
    if not hasattr(module, "inputs"):
        raise UserError(
            f"`{file}` has a torch module without example inputs: define `inputs`, a tensor or a tuple of them (on the "
            "meta device if you like), or `program = (module, inputs)`."
        )
    return offered, module.inputs, {}


def _from_torch(pair: tuple[Any, Any, Any], module: ModuleType, file: Path, options: dict[str, Any]) -> Program:
    from autoshard.program.torch.torch_module import from_torch

    loss, targets = getattr(module, "loss", None), getattr(module, "targets", None)
    if not options.get("train"):
        own = (
            "optimizer",
            "state_dtype",
            "remat",
            "gradient_groups",
            *(() if options.get("stages") else ("microbatches",)),
        )
        training = [key for key in own if key in options]
        if training:
            raise UserError(f"{_flags(training)} only apply to training; add `--train`, or leave them out.")
        return from_torch(*pair, name=file.stem, **options)
    if not callable(loss):
        raise UserError(
            f"`--train` needs a loss, and `{file}` has none: define `loss(output)` in it, or `targets` and "
            "`loss(output, targets)`; or let `program` be autoshard.program.from_torch(module, inputs, train=True, "
            "loss=...)."
        )
    return from_torch(*pair, name=file.stem, loss=loss, targets=targets, **options)


def _no_roles(roles: Roles | None, file: Path, entry: str) -> None:
    if roles is not None:
        raise UserError(
            f"`--roles` is for modules in files and for `(function, arguments)`; `{entry}` in `{file}` is neither."
        )


def _as_program(offered: Any, file: Path, entry: str, roles: Roles | None) -> Program:
    if isinstance(offered, (tuple, list)) and len(offered) == 2 and callable(offered[0]) and not _is_module(offered[0]):
        return trace(offered[0], offered[1], name=file.stem, roles=roles)
    _no_roles(roles, file, entry)
    if isinstance(offered, Program):
        return offered
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
    reason = str(error.msg) if isinstance(error, SyntaxError) else reason_of(error)
    text = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return f"{text} (line {line})" if line else text


def _article(text: str) -> str:
    return f"an {text}" if text[:1].lower() in "aeiou" else f"a {text}"
