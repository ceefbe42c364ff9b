"""Results of slow work kept on disk by content, for every room.

An entry is one file, the user's alone: a line of JSON (its key, the hash of the rest), then whatever is kept. Nothing
in it is ever executed, and an entry whose hashes do not agree is not used, nor one that is another user's. A key holds
everything that decides the content (what went in, the sources that make it, the versions of what they call), so an
entry cannot be stale.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autoshard.base.files import BESIDE, is_ours, write_own


VARIABLE = "AUTOSHARD_CACHE_DIR"
"""Directory of the entries; set but empty for none."""
MOST = 64
"""Entries of one kind that are kept; the oldest go first."""
FORGOTTEN_S = 3600.0
"""Seconds after which a file that is being written has been given up."""
_log = logging.getLogger("autoshard")
_warned: set[str] = set()


def cache_directory() -> Path | None:
    """`AUTOSHARD_CACHE_DIR`, else `autoshard` in the user's cache directory; None if it is turned off."""
    return user_directory(VARIABLE, "XDG_CACHE_HOME", ".cache")


def user_directory(own: str, variable: str, usual: str) -> Path | None:
    """The directory that the environment variable `own` names; set but empty for none.

    Without it `autoshard` in the directory that `variable` names, else in `usual` of the user's home; None for a user
    without a home, as in a container that runs under a number of no account.
    """
    text = os.environ.get(own)
    if text is not None:
        return Path(text) if text.strip() else None
    base = os.environ.get(variable, "").strip()
    try:
        return (Path(base) if base else Path.home() / usual) / "autoshard"
    except RuntimeError:
        return None


def key_of(said: Any, packages: Sequence[str], sources: Sequence[str]) -> str:
    """Key of what is made of `said` (JSON) by `packages`, in their versions, and by this package's files `sources`."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    versions = {package: version(package) for package in packages}
    everything = [said, versions, platform.python_version(), settings, _hash_of(sources)]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


def version(package: str) -> str:
    """The installed version, empty for none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _hash_of(sources: Sequence[str]) -> str:
    """Hash of every file of this package that matches one of the patterns."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted({path for pattern in sources for path in package.glob(pattern)}):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package).as_posix()} {len(content)} ".encode() + content)
    return total.hexdigest()


def read_entry(kind: str, key: str) -> bytes | None:
    """What is kept; None if there is nothing, or the file is another user's, or not just as it was written."""
    folder = cache_directory()
    if folder is None:
        return None
    try:
        with open(folder / f"{key}.{kind}", "rb") as file:
            if not is_ours(os.fstat(file.fileno())):
                return None
            first, _, body = file.read().partition(b"\n")
    except OSError:
        return None
    return body if first == _head(key, body) else None


def write_entry(kind: str, key: str, body: bytes) -> None:
    """Keep `body`. A directory that cannot be written costs one warning and nothing else."""
    folder = cache_directory()
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_own(folder / f"{key}.{kind}", _head(key, body) + b"\n" + body)
        _drop_oldest(folder, kind)
    except OSError as error:
        if str(folder) not in _warned:
            _warned.add(str(folder))
            reason = error.strerror or error
            _log.warning("autoshard: %s cannot be used as a cache (%s); planning goes on without it.", folder, reason)


def _head(key: str, body: bytes) -> bytes:
    return json.dumps({"key": key, "body": hashlib.sha256(body).hexdigest()}).encode()


def _drop_oldest(folder: Path, kind: str) -> None:
    for path in _newest_first(folder.glob(f"*.{kind}"))[MOST:]:
        path.unlink(missing_ok=True)
    # What processes that were killed had begun to write; nobody else is at it after so long.
    for path in folder.glob(f"{BESIDE}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > FORGOTTEN_S:
                path.unlink()


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Those that are still there: other processes drop entries as well."""
    times: dict[Path, float] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)
