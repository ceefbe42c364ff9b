"""Traced programs cached on disk by content, so that a second plan of a model skips the tracing.

An entry has a line of JSON with the arguments and results, then the module's bytecode, and the modules of other
platforms that differ. Only `hf:` programs and modules in files are found by their source. A Python file may depend on
anything, so it is traced for every plan. Its program is found by the plan that was made of it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autoshard.base.disk_cache import key_of, read_entry, write_entry
from autoshard.errors import UserError
from autoshard.program.config_files import read_config
from autoshard.program.platforms import PLATFORMS, Lowerings, lowered_for
from autoshard.program.program_record import Argument, Lifted, Program, Result, Role


_KIND = "program"
_PLANNED = "planned"
_PACKAGES = ("jax", "jaxlib", "torch", "torchax", "transformers", "optax")
"""Packages whose versions are part of an entry's key."""
_SOURCES = ("program/**/*.py", "mlir/*.py", "base/call_rules.py", "base/disk_cache.py")
"""Files of this package whose content is part of an entry's key."""


def open_config(config: str, options: Mapping[str, Any], trace: Callable[[], Program]) -> Program:
    """Return the program of `hf:config` from disk, or else trace it by `trace` and store it.

    The key is the configuration's name and fields, the options, and versions of packages and sources. A program from
    disk can be planned; its `args` are empty, and its `fn` traces the model when it is called. Raises the errors of
    `read_config` and of `trace`.

    - `config`: text after `hf:`.
    - `options`: options of the step, which must be JSON values.
    """
    name, fields = read_config(config)
    return _open([name, fields, sorted(options.items())], trace)


def open_file(path: Path, roles: Mapping[str, Any] | None, trace: Callable[[], Program]) -> Program:
    """Return the program of a module in a file from disk, or else trace it by `trace` and store it.

    The key is the file's name and content, and `roles`: roles of arguments by name. A file that cannot be read is
    traced, which reports the error.
    """
    try:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return trace()  # `trace` reports the error
    return _open([path.name, content, sorted((name, str(role)) for name, role in (roles or {}).items())], trace)


def store_program(said: Any, program: Program) -> None:
    """Store a program, as it is lowered, under the key `said`, a JSON value that identifies it."""
    key = key_of(said, _PACKAGES, _SOURCES)
    write_entry(_PLANNED, key, _encode(dataclasses.replace(program, lowerings=None)))


def stored_program(said: Any) -> Program | None:
    """Return the program that `store_program` stored under `said`; None without one.

    It can be planned; its function raises `UserError`.
    """
    body = read_entry(_PLANNED, key_of(said, _PACKAGES, _SOURCES))
    if body is None:
        return None

    def untraced() -> Program:
        """Raise `UserError`: the entry has no function."""
        raise UserError("a stored program cannot be run; open its source again.")

    try:
        return _decode(body, untraced)
    except (ValueError, TypeError, KeyError):
        return None  # an entry of another format despite its hash


def _open(said: Any, trace: Callable[[], Program]) -> Program:
    """Return the program of the key `said`, a JSON value, from disk, or else trace and store it.

    An entry that cannot be decoded is traced again and overwritten.
    """
    key = key_of(said, _PACKAGES, _SOURCES)
    body = read_entry(_KIND, key)
    if body is not None:
        try:
            return _decode(body, trace)
        except (ValueError, TypeError, KeyError):
            pass  # an entry of another format despite its hash
    program = trace()
    write_entry(_KIND, key, _encode(program))
    return program


def _encode(program: Program) -> bytes:
    """Return a program as the bytes of an entry; the program is lowered for all platforms for that."""
    head = {
        field: getattr(program, field)
        for field in (
            "name",
            "donate_argnums",
            "fingerprint",
            "training",
            "model_flops",
            "tokens",
            "layers",
            "savable",
            "block_classes",
            "weights",
            "unpadded",
            "stacks",
            "pipeline",
            "notes",
            "exchange",
            "on_host",
            "platform",
        )
    }
    head |= {
        "lifted": program.lifted,
        "arguments": [dataclasses.asdict(argument) for argument in program.arguments],
        "results": [dataclasses.asdict(result) for result in program.results],
    }
    modules = dict(_other_modules(program))
    head["sizes"] = {platform: len(module) for platform, module in modules.items()}
    return b"".join((json.dumps(head).encode(), b"\n", program.module, *modules.values()))


def _other_modules(program: Program) -> Iterator[tuple[str, bytes]]:
    """Yield (platform, module) of each platform whose module differs from the program's own."""
    for platform in PLATFORMS:
        module = lowered_for(program, platform).module
        if module != program.module:
            yield platform, module


def _decode(body: bytes, trace: Callable[[], Program]) -> Program:
    """Return the program of an entry, with empty `args`; its function and missing platforms are traced on demand.

    Raises `ValueError`, `TypeError` or `KeyError` for an entry of another format.
    """
    text, _, rest = body.partition(b"\n")
    head = json.loads(text)
    module, others, end = rest[: len(rest) - sum(head["sizes"].values())], {}, len(rest)
    for platform, size in reversed(head["sizes"].items()):
        others[platform], end = rest[end - size : end], end - size
    modules = dict.fromkeys(PLATFORMS, module) | others
    return Program(
        name=head["name"],
        fn=lambda *args: trace().fn(*args),
        args=(),
        donate_argnums=tuple(head["donate_argnums"]),
        arguments=tuple(_arguments(head["arguments"])),
        results=tuple(Result(**(each | {"shape": tuple(each["shape"])})) for each in head["results"]),
        module=module,
        fingerprint=head["fingerprint"],
        training=head["training"],
        model_flops=head["model_flops"],
        layers=head["layers"],
        savable=tuple(head["savable"]),
        block_classes=tuple(head["block_classes"]),
        weights={name: tuple(members) for name, members in head["weights"].items()},
        unpadded={name: tuple(shape) for name, shape in head["unpadded"].items()},
        stacks=tuple(head["stacks"]),
        pipeline=head["pipeline"],
        tokens=head["tokens"],
        notes=tuple(head["notes"]),
        exchange=head["exchange"],
        lifted=Lifted(head["lifted"]),
        on_host=head["on_host"],
        platform=head["platform"],
        lowerings=Lowerings(lambda platform: lowered_for(trace(), platform).module, modules),
    )


def _arguments(rows: list[dict[str, Any]]) -> Iterator[Argument]:
    """Yield the arguments of an entry's rows."""
    for row in rows:
        yield Argument(**(row | {"shape": tuple(row["shape"]), "role": Role(row["role"])}))
