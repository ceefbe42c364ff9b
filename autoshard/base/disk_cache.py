"""Disk cache of slow computations, addressed by content, for every room.

An entry is one file that only the user may read: a line of JSON (key and hash of the body), then the body. The cache
never executes an entry. It ignores an entry whose hash differs or whose owner is another user. A key hashes everything
that determines the body: inputs, source files and package versions. Therefore an entry cannot be stale.
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

from autoshard.base.files import TEMPORARY_PREFIX, is_ours, write_own


VARIABLE = "AUTOSHARD_CACHE_DIR"
"""Environment variable that names the directory of the cache; set but empty, it turns the cache off."""
MOST = 64
"""Most entries of one kind in the cache; the oldest are dropped first."""
FORGOTTEN_S = 3600.0
"""Seconds after which a temporary file counts as abandoned by its writer."""
_log = logging.getLogger("autoshard")
_warned: set[str] = set()


def cache_directory() -> Path | None:
    """Return `AUTOSHARD_CACHE_DIR`, else `autoshard` in the user's cache directory; None without a cache.

    There is none if the variable is set but empty, or if the user has no home.
    """
    return user_directory(VARIABLE, "XDG_CACHE_HOME", ".cache")


def user_directory(own: str, variable: str, usual: str) -> Path | None:
    """Return the directory that the environment variable `own` names; None if it is set but empty.

    If `own` is not set, return `autoshard` in the directory that `variable` names, else in `usual` of the user's home.
    Return None for a user without a home, such as a container's user id without an account.
    """
    text = os.environ.get(own)
    if text is not None:
        return Path(text) if text.strip() else None
    base = os.environ.get(variable, "").strip()
    try:
        return (Path(base) if base else Path.home() / usual) / "autoshard"
    except RuntimeError:
        return None


def key_of(inputs: Any, packages: Sequence[str], sources: Sequence[str]) -> str:
    """Return the cache key of a result: 64 hex digits, a hash of everything that determines it.

    It covers the inputs, the versions of the packages and of Python, the content of the source files, and the
    environment variables `JAX_*`.

    - `inputs`: inputs of the computation, as JSON; any other value counts by its `str`.
    - `packages`: packages whose versions matter; one that is not installed has an empty version.
    - `sources`: glob patterns, relative to this package, of its files that compute the result.
    """
    settings = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    versions = {package: version(package) for package in packages}
    everything = [inputs, versions, platform.python_version(), settings, _hash_of(sources)]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


def version(package: str) -> str:
    """Return the installed version of a package, empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _hash_of(sources: Sequence[str]) -> str:
    """Return the hex SHA-256 of the path and content of every file of this package that matches one of the patterns."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted({path for pattern in sources for path in package.glob(pattern)}):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package).as_posix()} {len(content)} ".encode() + content)
    return total.hexdigest()


def read_entry(kind: str, key: str) -> bytes | None:
    """Return the body of the entry `key` of a kind, the file `KEY.KIND`.

    None if the cache is turned off, or if the entry does not exist, belongs to another user, or is damaged.
    """
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
    """Store `body` as the entry `key` of a kind, and drop the oldest entries of that kind beyond `MOST`.

    A cache that is turned off stores nothing. A directory that cannot be written to causes one warning and no error.
    """
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
    """Return the first line of an entry: its key and the hash of its body."""
    return json.dumps({"key": key, "body": hashlib.sha256(body).hexdigest()}).encode()


def _drop_oldest(folder: Path, kind: str) -> None:
    """Delete the oldest entries of a kind beyond `MOST`, and abandoned temporary files."""
    for path in _newest_first(folder.glob(f"*.{kind}"))[MOST:]:
        path.unlink(missing_ok=True)
    # Killed processes leave temporary files behind; no live process writes one for longer than `FORGOTTEN_S`.
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > FORGOTTEN_S:
                path.unlink()


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort paths by time of change, newest first. Paths that other processes have deleted by now are left out."""
    times: dict[Path, float] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)
