"""Files are written whole or stay unchanged. Links, modes, owners, devices and pipes stay as they are."""

import contextlib
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from autoshard.base.files import write_whole


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def mask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_new_file_gets_what_the_users_mask_leaves(tmp_path: Path):
    write_whole(tmp_path / "new", b"1")
    os.umask(0o077)
    write_whole(tmp_path / "own", b"2")
    assert (mode(tmp_path / "new"), mode(tmp_path / "own")) == (0o644, 0o600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "own"]


@pytest.mark.parametrize("kept", [0o600, 0o640, 0o444, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, kept: int):
    (path := tmp_path / "plan.json").write_bytes(b"old")
    path.chmod(kept)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new" and mode(path) == kept


def test_the_owner_of_a_file_stays_its_owner(tmp_path: Path):
    (path := tmp_path / "plan.json").write_bytes(b"old")
    if os.geteuid() != 0:
        pytest.skip("only root may give a file away")
    os.chown(path, 12345, 54321)
    write_whole(path, b"new")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


def test_through_a_link_the_file_is_written(tmp_path: Path):
    (folder := tmp_path / "there").mkdir()
    (folder / "plan.json").write_bytes(b"old")
    (folder / "plan.json").chmod(0o600)
    for name in ("plan.json", "none.json"):
        (link := tmp_path / name).symlink_to(folder / name)
        write_whole(link, b"new")
        assert link.is_symlink() and (folder / name).read_bytes() == b"new"
    assert mode(folder / "plan.json") == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["none.json", "plan.json"]


def test_devices_and_pipes_are_written_to(tmp_path: Path):
    write_whole("/dev/null", b"gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="No space left"):
        write_whole("/dev/full", b"1")
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):  # the pipe has no reader
        write_whole(pipe, b"1")
    content, found = os.urandom(1 << 18), []  # more than a pipe buffers
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    for _ in range(1000):  # until the reader has opened the pipe
        with contextlib.suppress(OSError):
            write_whole(pipe, content)
            break
        time.sleep(0.01)
    reader.join(10)
    assert found == [content]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_open_file_is_written_to_by_its_descriptor(tmp_path: Path):
    with open(tmp_path / "open", "wb") as file:
        write_whole(f"/dev/fd/{file.fileno()}", b"1")
        file.seek(0, os.SEEK_END)
        file.write(b"2")
    assert (tmp_path / "open").read_bytes() == b"12"


@pytest.mark.parametrize("name", ["x" * 255, "x" * 300, "no/where", "file/under"])
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, name: str):
    (tmp_path / "file").write_bytes(b"")
    if len(name) == 255:
        write_whole(tmp_path / name, b"1")  # the longest possible name
        return
    with pytest.raises(OSError):
        write_whole(tmp_path / name, b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
