"""Observations on disk, in the user's data directory: one SQLite file that any number of processes read and write.

Every observation is one row, added in one transaction that is on the disk before `add` returns. A process that is
killed at any moment leaves whole rows only. Rows carry the hash of their content. A foreign or damaged file is renamed
in its directory and never deleted. A directory that cannot be written causes one warning, and nothing is stored.

Each reader and writer has a shared lock on a lock file next to the database. A process that renames the database needs
that lock exclusively. It checks the damage again under the lock, so that no good file is renamed while another process
writes.
"""

import contextlib
import datetime
import hashlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from autoshard.base.disk_cache import user_directory
from autoshard.base.files import PRIVATE, is_ours
from autoshard.cost.observations import Observation


try:
    import fcntl
except ImportError:  # Windows: SQLite's own locks only
    fcntl = None


VARIABLE = "AUTOSHARD_DATA_DIR"
"""Environment variable with the database's directory; set but empty for no database."""
FILE = "observations.sqlite3"
"""Name of the database in its directory."""

_APPLICATION = 0x41534F42  # "ASOB", in the file's head
_SCHEMA = 1
_WAIT_S = 60.0
"""Seconds that a writer waits for the others."""
_TABLE = """
CREATE TABLE IF NOT EXISTS observations (
    id TEXT PRIMARY KEY, topology TEXT, compiler TEXT, judge TEXT, op TEXT, content TEXT, kept_at TEXT
) WITHOUT ROWID
"""
_log = logging.getLogger("autoshard")
_reported: set[tuple[str, str]] = set()
T = TypeVar("T")


def data_directory() -> Path | None:
    """Return `AUTOSHARD_DATA_DIR`, else `autoshard` in the user's data directory; None if it is turned off."""
    return user_directory(VARIABLE, "XDG_DATA_HOME", ".local/share")


class Database:
    """The observations in one directory. Any call that finds a damaged or foreign file renames it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE

    @classmethod
    def of_user(cls) -> "Database | None":
        """Return the database in the user's data directory; None if it is turned off."""
        folder = data_directory()
        return None if folder is None else cls(folder)

    def add(self, observations: Sequence[Observation]) -> bool:
        """Store observations, all or none; return True once they are on the disk, and False if they are not stored.

        An observation that is already stored stays unchanged. Nothing is raised: a file or directory that cannot be
        written, or that belongs to another user or a newer version, causes a warning.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        rows = [(o.id, o.topology, o.compiler, o.judge, o.op, o.to_json(), now) for o in observations]

        def insert(connection: sqlite3.Connection) -> bool:
            """Insert the rows in one transaction; return True."""
            connection.execute("BEGIN IMMEDIATE")
            _prepare(connection)
            connection.executemany("INSERT OR IGNORE INTO observations VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            connection.execute("COMMIT")
            return True

        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, PRIVATE))
        except OSError as error:
            self._say("write", f"cannot be written ({error.strerror or error}); new observations are not saved.")
            return False
        return self._work(insert, False)

    def read(self, topology: str, compiler: str) -> list[Observation]:
        """Return all observations of a topology and compiler version, in the order of their ids.

        The list is empty if there is no file, or none that can be read.
        """
        try:
            if not self.path.exists():
                return []
        except OSError as error:
            self._say("read", f"cannot be read ({error.strerror or error}).")
            return []

        def select(connection: sqlite3.Connection) -> list[Observation]:
            """Select the rows; a file without tables has none."""
            if _is_empty(connection):
                return []
            query = "SELECT content FROM observations WHERE topology = ? AND compiler = ? ORDER BY id"
            return [_observation(content) for (content,) in connection.execute(query, (topology, compiler))]

        return self._work(select, [])

    def _work(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Run `work` on the checked file and return its result; return `otherwise` after a warning if that fails.

        A damaged file is set aside, and `work` then runs once more on a new file.
        """
        for attempt in range(2):
            try:
                if self.path.exists() and not is_ours(self.path.stat()):
                    self._say("owner", "belongs to another user; it is not used.")
                    return otherwise
                with self._locked(alone=False), _connected(self.path) as connection:
                    _check(connection)
                    return work(connection)
            except _NewerError:
                self._say("newer", "was written by a newer autoshard; it is neither read nor changed.")
                return otherwise
            except OSError as error:
                self._say("use", f"cannot be used ({error.strerror or error}); work goes on without it.")
                return otherwise
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    self._say("use", f"cannot be used ({error}); work goes on without it.")
                    return otherwise
                if attempt or not self._set_aside(str(error)):
                    return otherwise
        return otherwise

    def _set_aside(self, why: str) -> bool:
        """Rename the damaged file to the first free `FILE.aside-N`; return True if it is gone, also by another process.

        Its journal is renamed first, so that SQLite does not apply it to a new file.
        """
        try:
            with self._locked(alone=True):
                if not self._is_damaged():
                    return True  # another process has set it aside
                number = 1
                while (renamed := self.path.with_name(f"{FILE}.aside-{number}")).exists():
                    number += 1
                for end in ("-journal", "-wal", "-shm", ""):
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(f"{self.path}{end}", f"{renamed}{end}")
        except OSError as error:
            self._say("aside", f"is damaged ({why}) and cannot be renamed ({error.strerror}); it is not used.")
            return False
        self._say("aside", f"is damaged or not ours ({why}): it is now {renamed.name}, and a new one is begun.")
        return True

    def _is_damaged(self) -> bool:
        """Return True if the file exists and fails the checks; a file of a newer version is not damaged."""
        if not self.path.exists():
            return False
        try:
            with _connected(self.path) as connection:
                _check(connection)
        except _NewerError:
            return False
        except sqlite3.DatabaseError as error:
            return _is_damage(error)
        return False

    @contextlib.contextmanager
    def _locked(self, alone: bool) -> Iterator[None]:
        """Lock the file next to the database for the `with` block, exclusively if `alone`; do nothing on Windows.

        Raises `OSError` if an exclusive lock is impossible. A shared lock is skipped if the directory cannot be
        written, since no process can rename the database then.
        """
        if fcntl is None:
            yield
            return
        try:
            handle = os.open(self.folder / f"{FILE}.lock", os.O_RDWR | os.O_CREAT, PRIVATE)
        except OSError:
            if alone:
                raise
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield
        finally:
            os.close(handle)

    def _say(self, what: str, line: str) -> None:
        """Warn once for each kind of problem (`what`), file and process."""
        if (what, str(self.path)) not in _reported:
            _reported.add((what, str(self.path)))
            _log.warning("autoshard: the database %s %s", self.path, line)


class _DamagedError(sqlite3.DatabaseError):
    """Damage that SQLite does not notice: a foreign file, or a row whose content does not match its hash."""


class _NewerError(Exception):
    """A file with a schema newer than this version reads."""


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection for the `with` block, so that none stays open across forks or between threads."""
    connection = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = FULL")
        yield connection
    finally:
        connection.close()


def _check(connection: sqlite3.Connection) -> None:
    """Refuse a file of another program or with damaged content (`_DamagedError`), and one of a newer version.

    A file without tables passes. Raises `_NewerError` for any other schema than this version's.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION:
        if application or schema or not _is_empty(connection):
            raise _DamagedError("it is another program's database")
        return
    if schema != _SCHEMA:
        raise _NewerError
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _DamagedError(verdict)
    for id, content in connection.execute("SELECT id, content FROM observations"):
        if not isinstance(content, str) or hashlib.sha256(content.encode()).hexdigest() != id:
            raise _DamagedError("a row does not say what it was written with")


def _is_empty(connection: sqlite3.Connection) -> bool:
    """Return True if the file has no tables."""
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def _prepare(connection: sqlite3.Connection) -> None:
    """Create the table and mark the file as ours if it has no tables, inside the transaction of its first rows."""
    if _is_empty(connection):
        connection.execute(_TABLE)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {_SCHEMA}")


def _observation(content: str) -> Observation:
    """Parse a row's content. Raises: `_DamagedError` if it cannot be parsed."""
    try:
        return Observation.from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _DamagedError("a row cannot be read") from error


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return True if the file itself is damaged, rather than the disk full, the permissions wrong or a lock missing."""
    if isinstance(error, _DamagedError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
