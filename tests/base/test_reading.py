"""JSON is parsed in pieces so that signals are handled. Input that needs too much time or memory is refused."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from autoshard.base import json_text
from autoshard.cli import main


ROOT = Path(__file__).parents[2]
STYLES: list[dict[str, Any]] = [
    {},
    {"separators": (",", ":")},
    {"indent": 1},
    {"indent": "\t"},
    {"ensure_ascii": False},
]


def draw(lots: random.Random, depth: int) -> Any:
    """Return a JSON value whose containers have different elements, and whose texts look like JSON."""
    kind = lots.randrange(4 if depth else 2)
    if kind == 0:
        return lots.choice([0, -1, 1.5, 1e300, True, None, 10**18])
    if kind == 1:
        return lots.choice(["", "],[", '},{"a":1},', '\\",', "\u00e4\n,", " , "]) * lots.randrange(3)
    values = [draw(lots, depth - 1) for _ in range(lots.randrange(6))]
    return values if kind == 2 else {f"{lots.choice('ab],')}{n}": value for n, value in enumerate(values)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Pieces of so few characters that small texts have many of them."""
    monkeypatch.setattr(json_text, "PIECE", 64)
    monkeypatch.setattr(json_text, "_SHORT", 8)


@pytest.mark.parametrize("style", range(len(STYLES)))
@pytest.mark.parametrize("loads", [json.loads, orjson.loads])
def test_pieces_equal_what_one_call_makes(style: int, loads: Any, small: None):
    lots = random.Random(style)
    for _ in range(150):
        value = [draw(lots, 4) for _ in range(8)]
        text = json.dumps(value if lots.random() < 0.5 else {"a": value, "b": value}, **STYLES[style])
        assert json_text.parse_pieces(f" {text}\n", loads) == json.loads(text)


def test_what_is_no_json_is_refused_in_pieces_as_well(small: None):
    lots = random.Random(1)
    for _ in range(2000):
        text = json.dumps([draw(lots, 4) for _ in range(6)], indent=lots.choice([None, 1]))
        place = lots.randrange(len(text))
        damaged = text[:place] + lots.choice(["", ",", "]", "{", '"', "x"]) + text[place + lots.randrange(2) :]
        try:
            expected = json.loads(damaged)
        except json.JSONDecodeError as error:
            with pytest.raises(json.JSONDecodeError) as caught:
                json_text.parse_pieces(damaged)
            assert (caught.value.pos, caught.value.msg) == (error.pos, error.msg) or "double quotes" in str(error)
        else:
            assert json_text.parse_pieces(damaged) == expected


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("unit", "command"),
    [*((unit, "solve") for unit in ("[],", "{},", '{"":[]},', "0,", "[[[]]],")), ("[],", "diff"), ("[],", "report")],
)
def test_a_small_file_that_unpacks_to_millions_of_objects_is_refused_at_once(
    unit: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole = f"[{unit * ((200 << 20) // len(unit))}0]".encode()
    (bomb := tmp_path / "bomb.json.gz").write_bytes(gzip.compress(whole, 1))
    began = time.process_time()
    assert main([command, str(bomb), *([str(bomb)] if command == "diff" else [])]) == 2
    assert time.process_time() - began < 4
    assert f"it would take more than {4 if command == 'solve' else 2} GiB of memory" in capsys.readouterr().err


@pytest.mark.few(2)
@pytest.mark.heavy
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["solve", "report"])
def test_signals_are_obeyed_while_json_is_parsed(sent: signal.Signals, command: str, tmp_path: Path):
    """Interrupt the parse of a file that is within the size limit and needs many seconds."""
    (large := tmp_path / "large.json").write_text("[" + "[[]]," * (8 << 20) + "0]")
    script = """
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
        from autoshard.base import json_text
        from autoshard.cli import main

        parse = json_text._Pieces.container
        def told(*arguments):
            print("parsing", file=sys.stderr, flush=True)
            json_text._Pieces.container = parse
            return parse(*arguments)
        json_text._Pieces.container = told
        raise SystemExit(main())
    """
    line = [sys.executable, "-c", textwrap.dedent(script), command, str(large)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "parsing\n"
        time.sleep(0.3)
        process.send_signal(sent)
        began = time.monotonic()
        assert process.wait(20) == 128 + sent
        assert time.monotonic() - began < 2
