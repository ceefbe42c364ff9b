"""Cache entries are whole although other processes write and drop entries at the same time."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard.base import disk_cache


ROOT = Path(__file__).parents[2]
WRITER = """
import sys
from autoshard.base import disk_cache as kept

kept.MOST = 4
for turn in range(30):
    for key in range(6):
        kept.write_entry("graph", str(key), f"{key} ".encode() * (1000 + 100 * key))
        found = kept.read_entry("graph", str(key))
        assert found in (None, f"{key} ".encode() * (1000 + 100 * key)), "half an entry"
"""


@pytest.mark.heavy
def test_eight_processes_share_one_cache(tmp_path: Path):
    env = os.environ | {"AUTOSHARD_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    for writer in writers:
        _, said = writer.communicate(timeout=300)
        assert (writer.returncode, said) == (0, "")
    assert not list(tmp_path.glob(".autoshard-*")) and len(list(tmp_path.iterdir())) <= 12


def test_what_killed_processes_were_writing_goes_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path))
    for name, age in (("old", 2 * disk_cache.FORGOTTEN_S), ("new", 0.0)):
        (path := tmp_path / f".autoshard-{name}").write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    disk_cache.write_entry("graph", "key", b"body")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".autoshard-new", "key.graph"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "file of all"])
def test_an_entry_takes_the_place_of_what_others_put_there(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replace the entry: no write follows a link, and no mode or owner is inherited."""
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (victim := tmp_path / "profile").write_bytes(b"mine")
    entry = tmp_path / "cache" / "key.graph"
    if kind == "link":
        entry.symlink_to(victim)
    elif kind == "dangling link":
        entry.symlink_to(tmp_path / "none")
    elif kind == "hard link":
        entry.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(entry)
    else:
        entry.write_bytes(b"")
        entry.chmod(0o666)
        if os.geteuid() == 0:
            os.chown(entry, 12345, 54321)
    disk_cache.write_entry("graph", "key", b"body")
    assert disk_cache.read_entry("graph", "key") == b"body"
    status = entry.lstat()
    assert stat.S_ISREG(status.st_mode) and (status.st_mode & 0o777, status.st_uid) == (0o600, os.geteuid())
    assert victim.read_bytes() == b"mine" and not (tmp_path / "none").exists()


def test_a_damaged_entry_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path))
    disk_cache.write_entry("graph", "key", b"body")
    whole = (tmp_path / "key.graph").read_bytes()
    for damaged in (b"", whole[:10], whole[:-1], whole + b"x", whole.replace(b"body", b"bode"), b"[" * 100_000):
        (tmp_path / "key.graph").write_bytes(damaged)
        assert disk_cache.read_entry("graph", "key") is None
    (tmp_path / "key.graph").write_bytes(whole)
    assert disk_cache.read_entry("graph", "key") == b"body" and disk_cache.read_entry("graph", "other") is None
