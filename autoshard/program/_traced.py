"""Traced programs kept on disk by content, so that a second plan of one model begins at the pricing.

An entry is one file: a line of JSON (its key's hash, the hash of the rest), then a line of JSON with the arguments and
results, then the module's bytecode. Nothing in it is ever executed, and an entry whose hashes do not agree is not used.
The key holds the configuration itself, the options, the sources of this package that trace, and the versions of what
lowers; so an entry cannot be stale. Entries are `hf:` programs only: a Python file may depend on anything.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autoshard.files import write_whole
from autoshard.program._config import read_config
from autoshard.program._program import Argument, Program, Result, Role


VARIABLE = "AUTOSHARD_CACHE_DIR"
"""Directory of the entries; set but empty for none."""
MOST = 64
"""Entries that are kept; the oldest go first."""
_PACKAGES = ("jax", "jaxlib", "torch", "torchax", "transformers", "optax")
_log = logging.getLogger("autoshard")
_warned: set[str] = set()


def cache_directory() -> Path | None:
    """`AUTOSHARD_CACHE_DIR`, else `autoshard` in the user's cache directory; None if it is turned off."""
    text = os.environ.get(VARIABLE)
    if text is not None:
        return Path(text) if text.strip() else None
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "autoshard"


def open_cached(config: str, options: Mapping[str, Any], trace: Callable[[], Program]) -> Program:
    """The program of `hf:config`: from disk if it is there, else by `trace`, and kept.

    One from disk can be planned; its `fn` traces the model when it is called. A directory that cannot be read or
    written costs one warning and nothing else. Raises what `trace` raises.
    """
    folder = cache_directory()
    if folder is None:
        return trace()
    key = _key(config, options)
    path = folder / f"{key}.program"
    found = _read(path, key, trace)
    if found is not None:
        return found
    program = trace()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, _encode(program, key))
        _drop_oldest(folder)
    except OSError as error:
        if str(folder) not in _warned:
            _warned.add(str(folder))
            reason = error.strerror or error
            _log.warning("autoshard: %s cannot be used as a cache (%s); planning goes on without it.", folder, reason)
    return program


def _key(config: str, options: Mapping[str, Any]) -> str:
    name, fields = read_config(config)
    versions = {package: _version(package) for package in _PACKAGES}
    settings = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    said = [name, fields, sorted(options.items()), versions, platform.python_version(), settings, _sources()]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _sources() -> str:
    """Hash of every source file that takes part in tracing."""
    package = Path(__file__).parent.parent
    total = hashlib.sha256()
    for path in sorted([*package.glob("program/**/*.py"), *package.glob("mlir/*.py"), package / "rules.py"]):
        total.update(path.relative_to(package).as_posix().encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _encode(program: Program, key: str) -> bytes:
    head = {
        field: getattr(program, field)
        for field in ("name", "donate_argnums", "fingerprint", "training", "model_flops", "tokens", "notes")
    }
    head |= {
        "arguments": [dataclasses.asdict(argument) for argument in program.arguments],
        "results": [dataclasses.asdict(result) for result in program.results],
    }
    body = json.dumps(head).encode() + b"\n" + program.module
    return json.dumps({"key": key, "body": hashlib.sha256(body).hexdigest()}).encode() + b"\n" + body


def _read(path: Path, key: str, trace: Callable[[], Program]) -> Program | None:
    """The program in a file; None if there is none, or the file is not just as it was written."""
    try:
        first, _, body = path.read_bytes().partition(b"\n")
        said = json.loads(first)
        if said != {"key": key, "body": hashlib.sha256(body).hexdigest()}:
            return None
    except (OSError, ValueError):
        return None
    text, _, module = body.partition(b"\n")
    head = json.loads(text)
    return Program(
        name=head["name"],
        fn=lambda *args: trace().fn(*args),
        args=(),
        donate_argnums=tuple(head["donate_argnums"]),
        arguments=tuple(_arguments(head["arguments"])),
        results=tuple(Result(**{**each, "shape": tuple(each["shape"])}) for each in head["results"]),
        module=module,
        fingerprint=head["fingerprint"],
        training=head["training"],
        model_flops=head["model_flops"],
        tokens=head["tokens"],
        notes=tuple(head["notes"]),
    )


def _arguments(rows: list[dict[str, Any]]) -> Iterator[Argument]:
    for row in rows:
        yield Argument(**{**row, "shape": tuple(row["shape"]), "role": Role(row["role"])})


def _drop_oldest(folder: Path) -> None:
    entries = sorted(folder.glob("*.program"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in entries[MOST:]:
        path.unlink(missing_ok=True)
