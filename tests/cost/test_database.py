"""The database: concurrent or killed writers leave whole rows only, and damaged or foreign files are moved away."""

import dataclasses
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cost import Database, Observation, Topology, compiler_version, content_hash, data_directory
from autoshard.cost import observation_database as module
from tests.cost.observed import bill, observation


ROOT = Path(__file__).parent.parent.parent
ONE, OTHER = observation(bill(matmul=3, traffic=1e6), 0.1, "one"), observation(bill(traffic=1e6), 0.2, "other")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_reported", set())


def kept(database: Database) -> list[Observation]:
    return database.read("cpu:8", "made up")


def test_what_is_added_is_read_by_topology_and_compiler(tmp_path: Path):
    database = Database(tmp_path / "new" / "folder")
    assert database.add([ONE, OTHER]) and database.add([ONE])
    assert sorted(kept(database), key=lambda o: o.about["name"]) == [ONE, OTHER]
    assert database.read("cpu:4", "made up") == database.read("cpu:8", "another") == []


def test_reading_creates_nothing(tmp_path: Path):
    assert kept(Database(tmp_path / "none")) == kept(Database(tmp_path)) == []
    assert not list(tmp_path.iterdir())


def test_the_hash_is_of_what_was_seen_not_of_when_or_in_which_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = Database(tmp_path / "a"), Database(tmp_path / "b")
    first.add([ONE, OTHER])
    for one in (OTHER, ONE, OTHER):
        second.add([one])
    assert content_hash(kept(first)) == content_hash(kept(second)) == content_hash([OTHER, ONE])
    assert re.fullmatch("[0-9a-f]{12}", content_hash([ONE]))
    changed = dataclasses.replace(ONE, seen={"seconds": 0.11})
    assert content_hash([changed, OTHER]) != content_hash([ONE, OTHER])


def start_writer(folder: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.cost.writer", str(folder), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.heavy
def test_nothing_acknowledged_is_lost_when_writers_meet_and_die(tmp_path: Path):
    """Start writers and kill some at arbitrary moments. Each row that a writer acknowledged is stored whole."""
    lasting = [start_writer(tmp_path, f"lasting{k}", 30) for k in range(2)]
    killed = [start_writer(tmp_path, f"killed{k}", 100_000) for k in range(3)]
    said: set[str] = set()
    for number, writer in enumerate(killed):
        with writer:
            assert writer.stdout is not None
            said.update(writer.stdout.readline().strip() for _ in range(5 + 7 * number))
            writer.send_signal(signal.SIGKILL)
            # Lines that the writer printed before it was killed. A partial line is no acknowledgement.
            said.update(line.strip() for line in writer.stdout if line.endswith("\n"))
    for writer in lasting:
        out, _ = writer.communicate(timeout=120)
        assert writer.returncode == 0
        said.update(out.split())
    found = {o.id for o in kept(Database(tmp_path))}
    assert len(said) >= 60 + 5 + 12 + 19 and said <= found
    # Killed between the commit and the acknowledgement: at most one row for each writer.
    assert len(found - said) <= len(killed)
    assert not list(tmp_path.glob("*.aside-*"))


def damage_text(path: Path) -> None:
    path.write_text("these are somebody's notes")


def damage_foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()


def damage_middle(path: Path) -> None:
    """Replace some pages of the file by noise, as a bad disk could."""
    content = bytearray(path.read_bytes())
    content[5000:9000] = os.urandom(4000)
    path.write_bytes(content)


def damage_row(path: Path) -> None:
    """Change a row's content, which SQLite cannot notice."""
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE observations SET content = replace(content, '0.1', '0.7')")
    connection.close()


def damage_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3000])


DAMAGES = [damage_text, damage_foreign, damage_middle, damage_row, damage_end]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("first", ["read", "add"])
def test_a_damaged_or_foreign_file_is_set_aside_and_reported_once(
    damage, first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    database = Database(tmp_path)
    assert database.add([dataclasses.replace(ONE, about={"name": f"{k}", "filler": "x" * 200}) for k in range(60)])
    damage(database.path)
    before = database.path.read_bytes()
    if first == "read":
        assert kept(database) == []
    assert database.add([OTHER])
    assert kept(database) == [OTHER] == kept(Database(tmp_path))
    (aside,) = tmp_path.glob("*.aside-*")
    assert aside.read_bytes() == before
    (record,) = caplog.records
    assert str(database.path) in record.getMessage() and aside.name in record.getMessage()


def test_files_set_aside_are_never_overwritten(tmp_path: Path):
    database = Database(tmp_path)
    for text in ("first", "second"):
        database.path.write_text(text * 200)
        assert kept(database) == []
        database.path.unlink(missing_ok=True)
    assert sorted(path.read_text()[:5] for path in tmp_path.glob("*.aside-*")) == ["first", "secon"]


def test_the_journal_of_a_killed_writer_is_rolled_back(tmp_path: Path):
    """Cut a transaction off after it has written to the file: the file is restored."""
    database = Database(tmp_path)
    database.add([ONE])
    connection = sqlite3.connect(database.path, isolation_level=None)
    connection.execute("PRAGMA cache_size = 2")  # the transaction is spilled to the file before its end
    connection.execute("BEGIN IMMEDIATE")
    for k in range(200):
        row = (f"{k}", "cpu:8", "made up", "measure", "step", "half" * 500, "")
        connection.execute("INSERT INTO observations VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for path in tmp_path.glob(f"{module.FILE}*"):
        shutil.copy(path, crashed / path.name)
    connection.close()
    assert (crashed / f"{module.FILE}-journal").exists()
    assert kept(Database(crashed)) == [ONE]


def test_a_newer_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    database = Database(tmp_path)
    database.add([ONE])
    with sqlite3.connect(database.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert kept(database) == [] and not database.add([OTHER])
    assert not list(tmp_path.glob("*.aside-*"))
    (record,) = caplog.records
    assert "newer autoshard" in record.getMessage()


def test_a_directory_that_cannot_be_made_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    database = Database(tmp_path / "file" / "data")
    assert not database.add([ONE]) and not database.add([OTHER]) and kept(database) == []
    (record,) = caplog.records
    assert str(database.path) in record.getMessage() and "not saved" in record.getMessage()


READ_ONLY = """
import logging, os, sys
from pathlib import Path
from autoshard.cost import Database
from tests.cost.observed import bill, observation
if os.geteuid() == 0:
    os.setuid(65534)  # permissions do not bind root
database = Database(Path(sys.argv[1]))
one = observation(bill(traffic=2e6), 0.3, "later")
print(len(database.read("cpu:8", "made up")), database.add([one]), database.add([one]))
"""


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions as on POSIX")
def test_a_read_only_directory_is_read_and_reported_once(tmp_path: Path):
    folder = tmp_path / "data"
    Database(folder).add([ONE])
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for parent in [tmp_path, *tmp_path.parents][:4]:  # xdist's workers have a folder of their own
        parent.chmod(parent.stat().st_mode | 0o055)
    command = [sys.executable, "-c", READ_ONLY, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "HOME": "/"})
    assert done.stdout.split() == ["1", "False", "False"], done.stderr
    assert done.stderr.count("autoshard: the database") == 1


def test_the_directory_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("AUTOSHARD_DATA_DIR", raising=False)
    assert data_directory() == tmp_path / "autoshard"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert data_directory() == Path.home() / ".local" / "share" / "autoshard"
    monkeypatch.setenv("AUTOSHARD_DATA_DIR", " ")
    assert data_directory() is None and Database.of_user() is None


def test_the_compiler_of_cpu_devices_includes_the_machine():
    assert "cores of" in compiler_version(Topology.parse("cpu:8"))
    assert compiler_version(Topology.parse("v5e:4x4")) == compiler_version(Topology.parse("v5p:2x2x2"))
    assert "cores of" not in compiler_version(Topology.parse("v5e:4x4"))
