"""Faulty input from a user: one sentence, exit code 2, no traceback, and nothing written.

The cases are refused before a program is traced, or while a tiny one is.
"""

import gzip
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard import UserError, cli
from autoshard.planning.record.plan_files import plan_from_json, plan_to_json
from tests.planning.record.test_store import PLAN


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5000
PLAN_TEXT = plan_to_json(PLAN)


def edited(*path: Any, to: Any) -> str:
    """Return a plan's file with one value replaced."""
    data = json.loads(PLAN_TEXT)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return json.dumps(data)


def problem(**changed: Any) -> str:
    body = {
        "nodes": {"intervals": [[0, 1]], "costs": [[1, 2]], "usages": [[3, 4]]},
        "edges": {"nodes": [], "costs": []},
        "usage_limit": 5,
    }
    return json.dumps({"problem": body | changed})


def calibration(value: str, figure: str = "matmul_efficiency") -> str:
    said = f'{{"value": {value}, "source": "s", "date": "2026-01-01"}}'
    return f'{{"schema": 1, "chips": {{"v5e": {{"{figure}": {said}}}}}}}'


def bomb(size: int) -> bytes:
    """Return a small gzip file of very many spaces."""
    part = gzip.compress(b" " * (1 << 24), 9)
    return part * (size >> 24)


# Files of no kind that a command reads, by their fault.
FILES: dict[str, str | bytes] = {
    "empty": "",
    "spaces": "   \n",
    "bytes": b"\xff\xfe\x00\x01",
    "latin": 'é{"a": 1}'.encode("latin-1"),
    "utf16": '{"a": 1}'.encode("utf-16"),
    "bom": b"\xef\xbb\xbf{}",
    "nul": b"\x00" * 64,
    "deep": DEEP,
    "deep-object": '{"format": "autoshard-plan", "schema": 1, "a":' * 5000,
    "long-number": f'{{"step_time_s": {LONG}}}',
    "number": "1",
    "null": "null",
    "text": '"plan"',
    "list": "[]",
    "object": "{}",
    "cut": PLAN_TEXT[:300],
    "nan": '{"step_time_s": NaN',
    "cut-gzip": gzip.compress(b"{}" * 1000)[:20],
    "bad-gzip": b"\x1f\x8b" + b"x" * 100,
}

# A command that reads a file in the place of FILE, and the other files that it needs.
READERS = {
    "diff FILE plan.json": None,
    "report FILE": None,
    "explain FILE z": None,
    "export FILE --to jax": None,
    "measure step.py --plan FILE": None,
    "compile step.py --plan FILE": None,
    "graph step.py --plan FILE": None,
    "plan step.py --topology cpu:8 --pin-from FILE": None,
    "report plan.json -o page.html --measured FILE": None,
    "report plan.json --perfetto trace.json --compiled FILE": None,
    "report plan.json -o page.html --compiled FILE": None,
    "report plan.json --perfetto trace.json --profile FILE": None,
    "solve FILE": None,
    "validate --pairs FILE": None,
    "plan hf:FILE --topology cpu:8": None,
    "sweep step.py --topology cpu:8 --out FILE": None,
    "plan FILE --topology cpu:8": None,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(PLAN_TEXT)
    (tmp_path / "step.py").write_text("raise SystemError('a file that is refused before it is run')\n")
    return tmp_path


def refused(line: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence with which a command ends."""
    before = _times(folder)
    code = cli.main([*line, "--quiet"])
    captured = capsys.readouterr()
    assert captured.err.startswith("autoshard: ") and captured.err.count("\n") == 1, captured.err
    assert code == 2 and captured.out == ""
    assert len(captured.err) < 1500
    assert _times(folder) == before
    return captured.err


def _times(folder: Path) -> dict[Path, int]:
    """Return the times of all files, without the bytecode that Python writes next to a file that it imports."""
    cache = "__pycache__"
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*") if cache not in path.parts and path != folder}


@pytest.mark.parametrize("command", READERS)
def test_files_of_every_wrong_kind(command: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            said = refused([word.replace("FILE", name) for word in command.split()], folder, capsys)
        except BaseException as error:
            raise AssertionError(f"{command} with {name}: {error}") from error
        assert name in said or "the plan has no timeline" in said


LINES = {
    # topologies
    "plan step.py --topology v5e:4x4*99999999": "has 1599999984 devices; plans are made for up to 262144",
    "plan step.py --topology v5e:4x4*0": "has 0 slices",
    f"plan step.py --topology v5e:4x4*{LONG}": "has a number of more than 9 digits",
    f"plan step.py --topology v5e:{LONG}x4": "has a number of more than 9 digits",
    f"plan step.py --topology v5litepod-{LONG}": "has a number of more than 9 digits",
    "plan step.py --topology v5e:0x0": "v5e has no shape 0x0",
    "plan step.py --topology v5p:400x400x400": "at most 8960 exist in a slice",
    "plan step.py --topology v5e:4x": "is not a shape such as",
    "plan step.py --topology cpu:0": "cpu has no shape 0",
    "plan step.py --topology cpu:99999": "cpu has no shape 99999",
    "plan step.py --topology cpu:-8": "is not of the form",
    "plan step.py --topology cpu:8*2": "cpu topologies are one machine",
    "plan step.py --topology h100:9": "h100 has no shape 9",
    "plan step.py --topology v5e:nan": "is not of the form",
    "plan step.py --topology v9:2x2": "unknown chip 'v9'",
    "plan step.py --topology \u00e9:2x2": "unknown chip",
    "plan step.py --topology cpu:8\n__import__('os')": "is not of the form",
    "compare step.py --topology v5e:4x4*99999999": "plans are made for up to",
    "sweep step.py --topology v5e:4x4*99999999": "plans are made for up to",
    "refine step.py --topology v5e:4x4*99999999": "plans are made for up to",
    "measure step.py --topology v5e:4x4*99999999": "plans are made for up to",
    # meshes
    "plan step.py --topology cpu:8 --mesh a=3": "8",
    "plan step.py --topology cpu:8 --mesh a=0,b=8": "",
    "plan step.py --topology cpu:8 --mesh a=-2,b=-4": "",
    "plan step.py --topology cpu:8 --mesh a=2,a=4": "",
    "plan step.py --topology cpu:8 --mesh a": "",
    "plan step.py --topology cpu:8 --mesh a=b": "",
    "plan step.py --topology cpu:8 --mesh a=8=8": "",
    "plan step.py --topology cpu:8 --mesh =8": "",
    f"plan step.py --topology cpu:8 --mesh a={LONG}": "",
    "plan step.py --topology cpu:8 --mesh a=1e1": "",
    "plan step.py --topology cpu:8 --mesh " + ",".join(f"a{n}=1" for n in range(99)): "",
    # numbers
    "plan hf:llama-tiny --topology cpu:8 --seq 99999999999": "'99999999999' is more than 2147483647",
    f"plan hf:llama-tiny --topology cpu:8 --batch {LONG}": "(5000 characters)",
    "plan hf:llama-tiny --topology cpu:8 --batch 1e3": "is not a positive whole number",
    "plan hf:llama-tiny --topology cpu:8 --batch -1": "",
    "plan hf:llama-tiny --topology cpu:8 --image 0": "is not a positive whole number",
    "plan hf:llama-tiny --topology cpu:8 --cache 4.5": "is not a positive whole number",
    "plan hf:llama-tiny --topology cpu:8 --microbatches inf": "is not a positive whole number",
    "plan hf:llama-tiny --topology cpu:8 --stages nan": "is not a positive whole number",
    "plan hf:llama-tiny --topology cpu:8 --capacity-factor inf": "is not a positive number",
    "plan hf:llama-tiny --topology cpu:8 --imbalance -1": "",
    "plan hf:llama-tiny --topology cpu:8 --imbalance 1e999": "is not a positive number",
    "plan step.py --topology cpu:8 --memory-limit 1e300": "is more GiB than there can be",
    "plan step.py --topology cpu:8 --memory-limit inf": "is not a positive number of GiB",
    "plan step.py --topology cpu:8 --time-limit 0": "is not a positive number of seconds",
    "plan step.py --topology cpu:8 --time-limit -inf": "",
    f"plan step.py --topology cpu:8 --seed {LONG}": "is not a whole number of 64 bits",
    "plan step.py --topology cpu:8 --seed 9223372036854775808": "is not a whole number of 64 bits",
    "plan step.py --topology cpu:8 --seed x": "is not a whole number of 64 bits",
    "plan step.py --topology cpu:8 --candidates 0": "is not a positive whole number",
    "plan step.py --topology cpu:8 --roles arg0-arg99999999999=batch": "counts further than there are arguments",
    "measure step.py --plan plan.json --steps 0": "is not a positive whole number",
    "measure step.py --plan plan.json --tolerance nan": "is not a number from 0 up",
    "compile step.py --plan plan.json --time-limit 0": "is not a positive number of seconds",
    "sweep step.py --topology cpu:8 --jobs 0": "is not a positive whole number",
    "sweep step.py --topology cpu:8 --price cpu=nan": "is not a positive number",
    "solve plan.json --threads 0": "",
    "solve plan.json --iterations -1": "",
    "solve plan.json --time-limit nan": "",
    # words
    "plan hf: --topology cpu:8": "`hf:` needs the path",
    "plan hf:../../etc/passwd --topology cpu:8": "is neither a file nor a bundled configuration",
    "plan hf:llama-tiny --topology cpu:8 --dtype float7": "",
    "plan hf:llama-tiny --topology cpu:8 --optimizer lion2": "",
    "plan hf:llama-tiny --topology cpu:8 --remat keep=": "",
    "plan hf:llama-tiny --topology cpu:8 --schedule circular:0": "",
    "plan hf:llama-tiny --topology cpu:8 --experts sorted:-1": "",
    "plan step.py --topology cpu:8 --xla-flags rm": "",
    "plan step.py --topology cpu:8 --pin w": "is not of the form NAME=SPEC",
    "plan step.py --topology cpu:8 --axis-only a": "is not of the form AXIS=GROUP",
    "plan step.py --topology cpu:8 --for nothing": "",
    "export plan.json --to nothing": "",
    "export plan.json --to jax-export": "is a file of bytes",
    "graph step.py --out graph.exe": ".exe is none of them",
    # files to write
    "plan step.py --topology cpu:8 --out /dev/stdout": "the answer goes to stdout already",
    "plan step.py --topology cpu:8 --out no/plan.json": "does not exist; create it first",
    "plan step.py --topology cpu:8 --out plan.json/x": "",
    "plan step.py --topology cpu:8 --out /": "is a directory",
    f"plan step.py --topology cpu:8 --out {'x' * 300}": "File name too long",
    "plan step.py --topology cpu:8 --out loop": "Too many levels of symbolic links",
    "plan step.py --topology cpu:8 --out lost": "is a link into the directory",
    "plan step.py --topology cpu:8 --out socket": "is a socket",
    "plan step.py --topology cpu:8 --save-problem no/p.json": "does not exist; create it first",
    "report plan.json -o no/r.html": "does not exist; create it first",
    "report plan.json -o /dev/full": "No space left on device",
    "export plan.json --to hlo -o /dev/full": "No space left on device",
    "export plan.json --to hlo -o pipe": "No such device or address",
    "sweep step.py --topology cpu:8 --plot no/p.svg": "does not exist; create it first",
    # files to read
    "diff loop plan.json": "Too many levels of symbolic links",
    "diff lost plan.json": "No such file or directory",
    "diff . plan.json": "Is a directory",
    "diff pipe plan.json": "is cut short",
    "diff socket plan.json": "No such device or address",
    "diff /dev/null plan.json": "is cut short",
    "diff /dev/zero plan.json": "it has more than the 256 MiB",
    "solve .": "Is a directory",
    "solve pipe": "is not JSON",
    "plan . --topology cpu:8": "is a directory",
    "plan pipe --topology cpu:8": "",
    "plan loop --topology cpu:8": "",
    "plan no.mlir --topology cpu:8": "there is no file",
    f"plan {'x' * 300}.py --topology cpu:8": "",
    f"diff {'x' * 300} plan.json": "File name too long",
    "plan step.py --topology cpu:8 --rules no.py": "",
    "plan hf:. --topology cpu:8": "",
    "validate --data no.json": "",
    "validate --data plan.json --pairs": "two questions",
    "measure step.py": "takes either --plan",
    "measure step.py --plan plan.json --topology cpu:8": "takes either --plan",
}


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_lines_that_cannot_be(line: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "loop").symlink_to("loop")
    (folder / "lost").symlink_to(folder / "nowhere" / "file")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        assert LINES[line] in refused(line.split(" "), folder, capsys)


EDITED = {
    "schema": edited("schema", to=True),
    "schema 0": edited("schema", to=0),
    "schema float": edited("schema", to=1.0),
    "negative shape": edited("arguments", 0, "shape", to=[-8, 4]),
    "shape of text": edited("arguments", 0, "shape", to=["8", 4]),
    "shape of floats": edited("arguments", 0, "shape", to=[8.0, 4]),
    "shape of truths": edited("arguments", 0, "shape", to=[True, 4]),
    "huge shape": edited("arguments", 0, "shape", to=[10**30, 4]),
    "nan time": edited("prediction", "step_time_s", to=float("nan")),
    "nan time as text": edited("prediction", "step_time_s", to="nan"),
    "infinite time": edited("prediction", "step_time_s", to="inf"),
    "negative time": edited("prediction", "compute_s", to=-1.0),
    "long time": edited("prediction", "compute_s", to=10**400),
    "negative bytes": edited("prediction", "peak_bytes", to=-1),
    "negative memory": edited("prediction", "memory", "batch", to=-1),
    "bytes of text": edited("prediction", "wire_bytes", "data", to="8"),
    "negative collective": edited("prediction", "collectives", 0, "seconds", to=-1),
    "negative baseline": edited("baselines", "fsdp", "step_time_s", to=-1),
    "nan gap": edited("plan_gap", to="nan"),
    "no limit": edited("memory_limit_bytes", to=0),
    "huge limit": edited("memory_limit_bytes", to=10**30),
    "huge objective": edited("objective", to=10**400),
    "no axis size": edited("mesh", 0, "size", to=0),
    "negative axes": edited("mesh", to=[{"axis": "model", "size": -4}, {"axis": "data", "size": -2}]),
    "axis size of truth": edited("mesh", 0, "size", to=True),
    "axis twice": edited("mesh", to=[{"axis": "a", "size": 4}, {"axis": "a", "size": 2}]),
    "negative device": edited("device_order", to=[-1, 1, 2, 3, 4, 5, 6, 7]),
    "device that is not there": edited("device_order", to=[0, 1, 2, 3, 4, 5, 6, 8]),
    "device twice": edited("device_order", to=[0, 0, 2, 3, 4, 5, 6, 7]),
    "topology that is none": edited("topology", to="v9:2x2"),
    "topology of code": edited("topology", to="cpu:8\nimport os"),
    "huge topology": edited("topology", to="v5e:4x4*99999999"),
    "topology of number": edited("topology", to=8),
    "no name": edited("program_name", to=None),
    "words of numbers": edited("words", to=[1]),
    "words of text": edited("words", to="batch over data"),
    "pins of text": edited("pins", to="x"),
    "pin of text": edited("pins", 0, "op", to="3"),
    "pin over no axis": edited("pins", 0, "spec", to=[["pipe"]]),
    "operand of three": edited("pins", 1, "operand", to=[1, 2, 3]),
    "spec of text": edited("arguments", 0, "spec", to="data"),
    "spec of depth": edited("arguments", 0, "spec", to=[[["data"]], []]),
    "role of number": edited("arguments", 0, "role", to=1),
    "name of number": edited("arguments", 0, "name", to=1),
    "arguments as object": edited("arguments", to={}),
    "provenance as list": edited("provenance", to=[]),
    "deep provenance": PLAN_TEXT.replace('"seed": 0', '"seed": ' + "[" * 200 + "]" * 200),
    "flags as number": edited("provenance", "xla_flags", to=3),
    "flags of numbers": edited("provenance", "xla_flags", to={"flags": [1]}),
    "source as text": edited("provenance", "source", to="step.py"),
    "source of number": edited("provenance", "source", to={"program": 1}),
    "options as list": edited("provenance", "source", to={"program": "step.py", "options": []}),
    "asked as text": edited("provenance", "asked", to="x"),
    "pinned as list": edited("provenance", "pinned", to=[]),
    "timeline as text": edited("timeline", to="x"),
    "negative span": edited(
        "timeline",
        to={
            "end_s": 1,
            "spans": [{"name": "a", "lane": "compute", "start_s": 0, "seconds": -1, "block": 0}],
            "moments_s": [],
            "memory": {},
        },
    ),
}


@pytest.mark.parametrize("what", EDITED)
def test_plans_that_were_edited(what: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "edited.json").write_text(EDITED[what])
    with pytest.raises(UserError, match="is damaged|is no plan"):
        plan_from_json(EDITED[what])
    assert "edited.json" in refused(["report", "edited.json"], folder, capsys)


def test_what_is_edited_is_a_plan_before():
    assert plan_from_json(edited("program_name", to=PLAN.program_name)) == PLAN


PROBLEMS = {
    "no nodes": problem(nodes={"intervals": [], "costs": [], "usages": []}),
    "infinite cost": problem(nodes={"intervals": [[0, 1]], "costs": [[float("inf"), 1]], "usages": [[1, 1]]}),
    "cost of float": problem(nodes={"intervals": [[0, 1]], "costs": [[1.5, 1]], "usages": [[1, 1]]}),
    "cost of truth": problem(nodes={"intervals": [[0, 1]], "costs": [[True, 1]], "usages": [[1, 1]]}),
    "cost of 65 bits": problem(nodes={"intervals": [[0, 1]], "costs": [[2**64, 1]], "usages": [[1, 1]]}),
    "negative cost of 65 bits": problem(nodes={"intervals": [[0, 1]], "costs": [[-(2**64), 1]], "usages": [[1, 1]]}),
    "no choice": problem(nodes={"intervals": [[0, 1]], "costs": [[]], "usages": [[]]}),
    "usages of another length": problem(nodes={"intervals": [[0, 1]], "costs": [[1, 2]], "usages": [[1]]}),
    "negative usage": problem(nodes={"intervals": [[0, 1]], "costs": [[1, 2]], "usages": [[-1, 1]]}),
    "interval backwards": problem(nodes={"intervals": [[3, 1]], "costs": [[1, 2]], "usages": [[1, 1]]}),
    "interval of three": problem(nodes={"intervals": [[1, 2, 3]], "costs": [[1, 2]], "usages": [[1, 1]]}),
    "edge to nowhere": problem(edges={"nodes": [[0, 7]], "costs": [[1, 2]]}),
    "edge of another length": problem(edges={"nodes": [[0, 0]], "costs": [[1]]}),
    "edges without costs": problem(edges={"nodes": [[0, 0]], "costs": []}),
    "limit of text": problem(usage_limit="5"),
    "limit of 65 bits": problem(usage_limit=2**64),
    "limit of truth": problem(usage_limit=True),
    "negative limit": problem(usage_limit=-1),
    "limit that is not finite": problem(usage_limit=float("nan")),
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_problems_that_are_none(what: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "problem.json").write_text(PROBLEMS[what])
    refused(["solve", "problem.json", "--out", "choices.json"], folder, capsys)


CALIBRATIONS = {
    "zero": calibration("0"),
    "negative": calibration("-1"),
    "infinite": calibration("Infinity"),
    "nan": calibration("NaN"),
    "text": calibration('"0.5"'),
    "truth": calibration("true"),
    "null": calibration("null"),
    "long": calibration(LONG),
    "milliseconds": calibration("5", "hop_s"),
    "infinite group": calibration("1e400", "gather_max_group"),
    "no flops": calibration("0", "vector_flops_per_s"),
    "much traffic": calibration("1e300", "relayout_traffic"),
    "unknown": calibration("1", "speed"),
    "chips as list": '{"schema": 1, "chips": []}',
    "figures as list": '{"schema": 1, "chips": {"v5e": []}}',
    "figure as number": '{"schema": 1, "chips": {"v5e": {"hop_s": 1e-6}}}',
    "chip that is none": '{"schema": 1, "chips": {"v9": {}}}',
    "schema 2": '{"schema": 2, "chips": {}}',
    "schema true": '{"schema": true, "chips": {}}',
    "deep": DEEP,
    "bytes": "\udcff",
}


@pytest.mark.parametrize("what", CALIBRATIONS)
def test_calibrations_that_are_none(
    what: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (folder / "own.json").write_bytes(CALIBRATIONS[what].encode(errors="surrogateescape"))
    (folder / "step.py").write_text(
        "import jax\nprogram = (lambda x: x * 2, (jax.ShapeDtypeStruct((8,), 'float32'),))\n"
    )
    monkeypatch.setenv("AUTOSHARD_CALIBRATION", "own.json")
    said = refused(["plan", "step.py", "--topology", "v5e:1x1", "--mesh", "a=1", "--out", "x.json"], folder, capsys)
    assert "own.json" in said


VARIABLES = (
    ("AUTOSHARD_CALIBRATION", "no.json", "no.json"),
    ("AUTOSHARD_CALIBRATION", ".", "Is a directory"),
    ("XLA_AUTO_SPMD_MESH", "x", "is not an axis"),
    ("XLA_AUTO_SPMD_MESH", "-2,-4", "is not an axis"),
    ("XLA_AUTO_SPMD_MESH", LONG, "is not an axis"),
    ("LIBTPU_INIT_ARGS", "rm -rf", ""),
)


@pytest.mark.parametrize(("name", "value", "said"), VARIABLES)
def test_variables_that_cannot_be(
    name: str, value: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (folder / "step.py").write_text(
        "import jax\nprogram = (lambda x: x * 2, (jax.ShapeDtypeStruct((8,), 'float32'),))\n"
    )
    monkeypatch.setenv(name, value)
    assert said in refused(["plan", "step.py", "--topology", "v5e:1x1", "--out", "x.json"], folder, capsys)


CONFIGS: dict[str, dict[str, Any]] = {
    "no size": {"hidden_size": 0},
    "negative size": {"hidden_size": -64},
    "size of text": {"hidden_size": "64"},
    "size of list": {"hidden_size": [64]},
    "size of nothing": {"hidden_size": None},
    "size of float": {"hidden_size": 64.5},
    "size that is not finite": {"hidden_size": float("inf")},
    "huge size": {"hidden_size": 10**30},
    "heads that do not divide": {"num_attention_heads": 7},
    "no heads": {"num_attention_heads": 0},
    "no layers": {"num_hidden_layers": 0},
    "negative layers": {"num_hidden_layers": -1},
    "huge layers": {"num_hidden_layers": 10**12},
    "no words": {"vocab_size": 0},
    "negative words": {"vocab_size": -5},
    "unknown kind": {"model_type": "nothing"},
    "kind of number": {"model_type": 7},
    "unknown class": {"architectures": ["Nothing"]},
    "function for a class": {"architectures": ["auto_docstring"]},
    "module for a class": {"architectures": ["nn"]},
    "layer for a class": {"architectures": ["LlamaAttention"]},
    "classes of text": {"architectures": "LlamaForCausalLM"},
    "activation that is none": {"hidden_act": "nothing"},
    "code from elsewhere": {"auto_map": {"AutoModelForCausalLM": "code.Mine"}, "model_type": "mine"},
}


@pytest.mark.parametrize("what", CONFIGS)
def test_configurations_that_cannot_be(what: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    base = json.loads((Path(autoshard.__file__).parent / "program/configs/llama-tiny.json").read_text())
    (folder / "code.py").write_text("open('executed', 'w')\n")
    (folder / "own.json").write_text(json.dumps(base | CONFIGS[what]))
    said = refused(["plan", "hf:own.json", "--topology", "v5e:1x1", "--no-cache", "--out", "x.json"], folder, capsys)
    assert "for a class" not in what or "transformers offers no" in said


PROGRAMS = {
    "empty": "",
    "syntax": "def program(:",
    "raises": "raise ValueError('no\\nluck')",
    "exits": "raise SystemExit(0)",
    "deep": "def f(n): return f(n + 1)\nf(0)",
    "nul": "\x00",
    "number": "program = 3",
    "nothing": "def program(): pass",
    "needs more": "def program(x): return x",
    "raises later": "def program(): raise KeyError('x')",
    "interrupts itself": "def program(): raise MemoryError",
    "not an array": "program = (lambda x: 'text', (1.0,))",
    "wrong count": "import jax\nprogram = (lambda x, y: x, (jax.ShapeDtypeStruct((8,), 'float32'),))",
    "huge": "import jax\nprogram = (lambda x: x + 1, (jax.ShapeDtypeStruct((2**40, 2**40), 'float32'),))",
    "huge within": "import jax\nprogram = (lambda x: x[:, None] + x, (jax.ShapeDtypeStruct((2**30,), 'float32'),))",
    "negative": "import jax\nprogram = (lambda x: x + 1, (jax.ShapeDtypeStruct((-8,), 'float32'),))",
    "too long": (
        "import jax\nmost = 2**31 - 1\n"
        "loop = lambda f: lambda x: jax.lax.fori_loop(0, most, lambda i, x: f(x), x)\n"
        "program = (loop(loop(lambda x: x @ x)), (jax.ShapeDtypeStruct((64, 64), 'float32'),))"
    ),
    "imports nothing": "import there_is_no_such_module",
    "bytes": "# \udcff\nprogram = 1",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_programs_that_are_none(what: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "own.py").write_bytes(PROGRAMS[what].encode(errors="surrogateescape"))
    refused(["plan", "own.py", "--topology", "v5e:2x2", "--mesh", "a=4", "--out", "x.json"], folder, capsys)


def shape(*dims: int) -> Any:
    import jax

    return jax.ShapeDtypeStruct(dims, "float32")


def call_plan(program: Any = None, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        made = autoshard.trace(lambda x: x * 2, (shape(8),)) if program is None else program
        return autoshard.plan(made, **{"topology": "v5e:1x1"} | options)

    return call


CALLS: dict[str, Callable[[], Any]] = {
    "topology of number": call_plan(topology=8),
    "topology of nothing": call_plan(topology=None),
    "huge topology": call_plan(topology="v5e:4x4*99999999"),
    "mesh of number": call_plan(mesh=3),
    "mesh of text sizes": call_plan(mesh={"a": "1"}),
    "mesh of numbers": call_plan(mesh={1: 1}),
    "mesh of nan": call_plan(mesh={"a": float("nan")}),
    "mesh that does not fit": call_plan(mesh={"a": 3}),
    "negative limit": call_plan(memory_limit=-1),
    "limit of text": call_plan(memory_limit="1 GiB"),
    "limit that is not finite": call_plan(memory_limit=float("nan")),
    "no time": call_plan(time_limit=0),
    "time of text": call_plan(time_limit="60"),
    "nan time": call_plan(time_limit=float("nan")),
    "seed of text": call_plan(seed="x"),
    "program of text": call_plan(program=3),
    "program that is no file": call_plan(program="no.py"),
    "pin of nothing": call_plan(pins={"nothing": "a"}),
    "unknown form": call_plan(form="nothing"),
    "no candidates": call_plan(candidates=0),
    "unknown flags": call_plan(xla_flags="nothing"),
    "load nothing": lambda: autoshard.load("no.json"),
    "load a directory": lambda: autoshard.load("."),
    "trace nothing": lambda: autoshard.trace(None, ()),
    "trace text": lambda: autoshard.trace(lambda x: x, ("text",)),
    "save nowhere": lambda: PLAN.save("no/plan.json"),
    "save to a full device": lambda: PLAN.save("/dev/full"),
    "explain nothing": lambda: PLAN.explain("nothing"),
    "no program": lambda: PLAN.explain("z"),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_cannot_be(what: str, folder: Path):
    before = sorted(folder.iterdir())
    with pytest.raises(UserError) as caught:
        CALLS[what]()
    assert "\n" not in str(caught.value)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("command", ["solve FILE", "report FILE"])
def test_what_is_unpacked_is_bounded(command: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "bomb.json.gz").write_bytes(bomb(1 << 30))
    said = refused([word.replace("FILE", "bomb.json.gz") for word in command.split()], folder, capsys)
    assert "it has more than the" in said and "MiB that are read of such a file" in said
