"""Opening of the source that a user names on the command line: a program file, or a model configuration."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from autoshard.base.call_rules import registrations
from autoshard.base.processes import check_addresses
from autoshard.base.shared_results import shared
from autoshard.errors import ENDINGS, UserError, reason_of
from autoshard.program.artifact import SUFFIXES, load_artifact
from autoshard.program.config_files import read_config
from autoshard.program.jax.host_state import on_host
from autoshard.program.jax.layer_stack import in_stages, pipelined, read_pipeline
from autoshard.program.jax.trace import in_one_microbatch, trace
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
    """Return the program that `text` names: `hf:CONFIG` (with its options), a Python file, or a module in a file.

    The program records the arguments of this call (`Program.source`), unless `roles` is a function.

    - `entry`: name that a Python file gives the program.
    - `roles`: roles of a file's arguments, by prefixes of their names, where the guess is wrong.
    - `kept`: True to take an `hf:` program or a module in a file from the disk cache if it is there. Such a program can
      be planned but not run.
    - `preferred`: options that apply if the source takes them and `options` do not set them: to `hf:` programs and
      torch modules.
    - `recipe`: arguments for the function in a Python file, from the choices that it leaves to the planner
      (`read_choices`).
    - `options`: options of the source; None stands for an option that is not given.

    Raises `UserError` if `text` names no source, or if `options` or a `recipe` are given to a source that takes none.
    It also does if the process is limited to less memory than XLA needs.
    """
    check_addresses()
    given: dict[str, Any] = {key: value for key, value in sorted(options.items()) if value is not None}
    program = _open(text, entry, roles, given, kept, preferred or {}, recipe or {})
    if callable(roles):
        return program  # a file cannot store a function
    if roles is not None:
        given["roles"] = {name: str(role) for name, role in roles.items()}
    more = {"preferred": dict(preferred or {}), "recipe": dict(recipe or {})}
    source = {"program": text, "entry": entry, "options": given} | {key: value for key, value in more.items() if value}
    return dataclasses.replace(program, source=source)


def read_choices(text: str, entry: str = "program") -> Choices:
    """Return the choices that a Python file leaves to the planner: its `choices`, or those of its `entry`.

    Other sources leave none: the result is empty. The file is run, unless its text does not contain `choices`. Raises
    `UserError` as `choices` does, and if the file raises.
    """
    file = Path(text)
    if file.suffix != ".py" or not file.is_file() or "choices" not in file.read_text(errors="replace"):
        return {}
    with _import_folder(file):
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
    """Return the program that `text` names; the arguments are those of `open_source`, without options of None.

    Files with any suffix but `.py` are read as modules.
    """
    if recipe and not text.endswith(".py"):
        raise UserError(f"the choices {_choices(recipe)} are for a function in a Python file; `{text}` takes none.")
    if text.startswith("hf:"):
        if roles is not None:
            raise UserError(f"`--roles` is for files; the roles of `{text}` are known, so leave it out.")
        options = {**preferred, **options}
        trace_config = functools.partial(_trace_config, text[3:], options)
        return open_config(text[3:], options, trace_config) if kept else trace_config()
    path = Path(text)
    if path.suffix == ".py" or path.suffix in SUFFIXES or path.is_file():
        own = [key for key in _asking(options) if path.suffix != ".py" or key not in _MODULE_OPTIONS]
        if own and path.suffix == ".json":
            raise UserError(f"{_flags(own)} only {_apply(own)} to a configuration: did you mean `hf:{text}`?")
        if own:
            raise UserError(f"{_flags(own)} only {_apply(own)} to `hf:CONFIG`; `{text}` says itself what it runs.")
        if path.suffix == ".py":
            return load_program(path, entry, roles, options, preferred, recipe)
        load = functools.partial(load_artifact, path, roles=roles)
        return load() if callable(roles) or not kept else open_file(path, roles, load)
    if path.is_dir():
        raise UserError(f"`{text}` is a directory; give the Python file that offers the program.")
    raise UserError(f"`{text}` is neither an existing file nor `hf:CONFIG`; did you mean `hf:{text}`?")


_MODULE_OPTIONS = ("train", "optimizer", "dtype", "param_dtype", "state_dtype", "remat", "attention")
_MODULE_OPTIONS += ("exchange", "microbatches", "experts", "capacity_factor", "imbalance", "host", "stages", "schedule")
_MODULE_OPTIONS += ("gradient_groups", "lora", "quantize")
"""Options of a torch module in a Python file; JAX functions in one also take `host`, `stages` and their schedule."""


def _asking(options: Mapping[str, Any]) -> list[str]:
    """Return the names of options but for `train` of False, the forward pass, which any source may be."""
    return [key for key, value in options.items() if key != "train" or value]


def _choices(recipe: Mapping[str, Any]) -> str:
    """Return the names of a recipe's arguments in words."""
    return ", ".join(f"`{name}`" for name in recipe)


def _flags(keys: Sequence[str]) -> str:
    """Return options in words, as flags of the command line."""
    return ", ".join(f"`--{key.replace('_', '-')}`" for key in keys)


def _apply(keys: Sequence[str]) -> str:
    """Return the verb `apply` in the number of some options."""
    return "applies" if len(keys) == 1 else "apply"


def config_program(fields: Mapping[str, Any], **options: Any) -> Program:
    """Return the program of the model whose configuration has these `fields`, with the options of `hf:CONFIG`.

    Raises `UserError` for fields or options that cannot be used.
    """
    from autoshard.program.hf.hf_program import from_config

    return from_config(fields, **options)


def _trace_config(config: str, options: dict[str, Any]) -> Program:
    """Return the program of `hf:config`, without the disk cache, with the state of the option `host` on the hosts.

    Recipes that differ in `host` alone share one trace.
    """
    from autoshard.program.hf.hf_program import from_config

    options = dict(options)
    host = _host_of(options)
    key = json.dumps([*read_config(config), sorted(options.items())], default=str)
    return _on_host(shared("trace", key, lambda: from_config(config, **options), 1), host)


def _on_host(program: Program, host: str | None) -> Program:
    """Return the program with `host` in the hosts' memory; unchanged if it is None, as the source has chosen then."""
    return program if host is None else on_host(program, host)


def _host_of(options: dict[str, Any]) -> str | None:
    """Remove the option `host` from `options` and return it; None if it is absent.

    Raises `UserError` if it is given and not `none`, and there are several pipeline stages.
    """
    host = options.pop("host", None)
    if host not in (None, "none") and (options.get("stages") or 1) > 1:
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
    with _import_folder(file):
        _run(file)
    if registrations() == before:
        raise UserError(
            f'--rules {path} registers no rule; call autoshard.register_rule("target", "b s -> b s") in it.'
        )


@contextlib.contextmanager
def _import_folder(file: Path) -> Iterator[None]:
    """Let a file import modules of its own folder while inside."""
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
    """Run a Python file and return the program that it offers under the name `entry`.

    `entry` is a `Program`, or a function that returns one; its arguments are those of `recipe`. Instead of a program
    it may be `(fn, args)` for JAX, or `(module, example_inputs)` for torch, with an optional third dict of keyword
    inputs. A torch module may also stand alone, as `entry` or as `model`, next to its example `inputs`. The file may
    import modules of its folder.

    - `roles`: those of `trace`, for `(fn, args)` only.
    - `options`: those of `from_torch`, for torch modules only. With `train` the step minimises the file's `loss`, a
      function of the output, and of its `targets` if there are any. Every `stack` of a JAX program takes `stages`,
      `microbatches` and `schedule`, and the program takes `host`.
    - `preferred`, `recipe`: those of `open_source`.

    Raises `UserError` if the file is missing, raises, or offers something else, and for options that do not apply.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file `{path}`; give the path of a Python file that offers `{entry}`.")
    given = {**(options or {})}
    host = _host_of(given)
    pipeline = read_pipeline(given.get("stages"), given.get("microbatches"), given.get("schedule"))
    with _import_folder(file), pipelined(pipeline) as stacks:
        module = _run(file)
        offered = _called(_offered(module, file, entry), file, entry, recipe or {})
        pair = _module_and_inputs(offered, module, file)
        if pair is not None:
            _no_roles(roles, file, entry)
            return _on_host(_from_torch(pair, module, file, {**(preferred or {}), **given}), host)
        ours = {"stages", "schedule"}
        if pipeline is not None or given.get("microbatches") == 1:
            ours.add("microbatches")
        own = [key for key in _asking(given) if key not in ours]
        if own:
            raise UserError(
                f"{_flags(own)} only {_apply(own)} to `hf:CONFIG` and to torch modules; `{entry}` in `{file}` says "
                "itself what it runs."
            )
        program = in_one_microbatch(_as_program(offered, file, entry, roles))
        if pipeline is not None and not stacks:
            raise UserError(
                f"`{entry}` in `{file}` has no layers that could be {pipeline.stages} stages: write the loop over them "
                "as `autoshard.stack(layer, stacked_parameters, x)`, or leave --stages out. Layers that are marked by "
                "autoshard.segment take --schedule 1f1b, interleaved:2 or zero-bubble."
            )
        return _on_host(in_stages(program, tuple(dict.fromkeys(stacks)), pipeline), host)


def _run(file: Path) -> ModuleType:
    """Run a Python file and return it as a module, added to `sys.modules`.

    Raises `UserError` for an error of its code.
    """
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
    except BaseException as error:  # user code, which may raise anything or exit
        sys.modules.pop(name, None)
        check_backend(error)
        raise UserError(f"`{file}` raised {_place(error, file)}.") from error
    return module


def _offered(module: ModuleType, file: Path, entry: str) -> Any:
    """Return the object called `entry`, or the file's torch module `model` if `entry` is `program`.

    Raises `UserError` if the file has neither.
    """
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
    """Call a function of the file with the arguments `recipe` and return its result; return anything else unchanged.

    Raises `UserError` for an error of the function, and for a recipe of anything else.
    """
    if not callable(offered) or isinstance(offered, Program) or _is_module(offered):
        if recipe:
            raise UserError(f"`{entry}` in `{file}` is no function that could take the choices {_choices(recipe)}.")
        return offered
    try:
        return offered(**recipe)
    except (UserError, *ENDINGS):
        raise
    except BaseException as error:  # the user's own code runs here
        check_backend(error)
        raise UserError(f"`{entry}()` in `{file}` raised {_place(error, file)}.") from error


def _module_and_inputs(offered: Any, module: ModuleType, file: Path) -> tuple[Any, Any, Any] | None:
    """Return a torch module, its example inputs and keyword inputs; None if something else is offered.

    Raises `UserError` for a module without inputs, and for keyword inputs that are no dict.
    """
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
    """Return the program of a torch module, with the file's `loss` and `targets` if it is trained.

    Without a `loss` in the file, the module must return its loss: one number, or an output whose `loss` is one.

    Raises `UserError` for options of training without `train`, and for training without a loss.
    """
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
            them = "it" if len(training) == 1 else "them"
            raise UserError(
                f"{_flags(training)} only {_apply(training)} to training; add `--train`, or leave {them} out."
            )
        program = from_torch(*pair, name=file.stem, **options)
        returned = [result for result in program.results if result.argument is None]
        if len(returned) != 1 or math.prod(returned[0].shape) != 1 or "float" not in returned[0].dtype:
            return program
        note = (
            f"This is the forward pass, and `{file}` returns one number: did you mean `--train`, with it as the loss?"
        )
        return dataclasses.replace(program, notes=(*program.notes, note))

    def own_loss(output: Any) -> Any:
        """Return the loss that a module computes itself."""
        number = getattr(output, "loss", output)
        if getattr(number, "shape", None) is not None and math.prod(number.shape) == 1:
            return number.reshape(())
        raise UserError(
            f"`--train` needs a loss, and `{file}` has none: define `loss(output)` in it, or `targets` and "
            "`loss(output, targets)`; or let the module return one number."
        )

    if not callable(loss):
        loss, targets = own_loss, None
    return from_torch(*pair, name=file.stem, loss=loss, targets=targets, **options)


def _no_roles(roles: Roles | None, file: Path, entry: str) -> None:
    """Raise `UserError` if roles are given for a program that takes none."""
    if roles is not None:
        raise UserError(
            f"`--roles` is for modules in files and for `(function, arguments)`; `{entry}` in `{file}` is neither."
        )


def _as_program(offered: Any, file: Path, entry: str, roles: Roles | None) -> Program:
    """Return the offered program, or trace `(function, arguments)` with `roles`. Raises `UserError` for anything else.

    A program with `roles` raises it too.
    """
    if isinstance(offered, (tuple, list)) and len(offered) == 2 and callable(offered[0]) and not _is_module(offered[0]):
        return trace(offered[0], offered[1], name=file.stem, roles=roles)
    _no_roles(roles, file, entry)
    if isinstance(offered, Program):
        return offered
    description = (
        f"{type(offered).__name__} of {len(offered)}" if isinstance(offered, (tuple, list)) else type(offered).__name__
    )
    raise UserError(
        f"`{entry}` in `{file}` gave {_article(description)}; expected an autoshard.Program, "
        "`(function, arguments)` for JAX, or `(torch module, example inputs)`."
    )


def _is_module(value: Any) -> bool:
    """Return True for a torch module; torch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_own(value: Any, module: ModuleType) -> bool:
    """Return True if a function or class is defined in the module, not imported."""
    return getattr(value, "__module__", None) == module.__name__


def _place(error: BaseException, file: Path) -> str:
    """Return `ValueError: text (line 12)`, where the line is the deepest one inside the user's file, if any."""
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
    """Return `text` after `a`, or after `an` if it begins with a vowel."""
    return f"an {text}" if text[:1].lower() in "aeiou" else f"a {text}"
