"""Progress: plain lines when piped, a line with its time on a terminal, nothing when quiet."""

import io
import re

import pytest

from autoshard.report import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", stream.getvalue())


def test_piped_it_prints_each_phase_as_it_starts():
    stream = io.StringIO()
    with ProgressLine(stream=stream) as progress:
        progress("one")
        assert stream.getvalue() == "one\n"
        progress("two [red]")
    assert stream.getvalue() == "one\ntwo [red]\n"


def test_on_a_terminal_each_phase_ends_with_its_time():
    stream = Terminal()
    with ProgressLine(stream=stream) as progress:
        progress("one [red]")
        progress("two")
    assert re.search(r"one \[red\] \(0\.\d s\)", plain(stream))
    assert re.search(r"two \(0\.\d s\)", plain(stream))


def test_on_a_terminal_the_phase_that_failed_is_marked():
    stream = Terminal()
    with pytest.raises(ValueError), ProgressLine(stream=stream) as progress:
        progress("one")
        raise ValueError
    assert "one (failed)" in plain(stream)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_quiet_it_prints_nothing(stream: io.StringIO):
    with ProgressLine(quiet=True, stream=stream) as progress:
        progress("one")
    assert stream.getvalue() == ""
