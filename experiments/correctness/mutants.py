"""Small changes of the planner's core, each of which some nearby test must notice.

    python experiments/correctness/mutants.py [--each 29] [--minutes 60] [--again] [--room graph ...]

The script draws `--each` places of every room with a fixed seed and changes one place at a time. A change replaces a
comparison, a sign, a constant, `and` by `or`, or `min` by `max`, drops a `not`, or disables a branch.

The tests that run the changed line run first, the quickest before others. Then the remaining tests of their files run,
all within a time limit. All nearby tests run if no test is known to run the line, as in a child process. The script
changes a copy of the checkout in a temporary folder, never the checkout.

The lines that each test runs are recorded by file under `build/mutants`. A record is valid while the tests and the
changed file stay the same. For long files only as many tests are recorded as there is time.

Maintained tools do not fit. Mutmut imports the package once and forks, which JAX's threads do not survive. It also
swaps functions that numba compiles. Cosmic-ray writes into the checkout and runs one command for all mutants.

Rows are saved in `results/mutants.json` as they are computed, and are not run again, except survivors with `--again`. A
survivor that computes the same has its reason in `data/equal_mutants.json`. The script writes `results/mutants.md`. The
exit code is 1 if too many mutants survived without a reason.
"""

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.lib.mutations import Mutant, drawn
from experiments.lib.saved_results import BUILD, Results


CHILD_OF = "LINE_MAP_TEST"
"""Environment variable by which `line_map.py` recognises the processes that a test starts."""
ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parents[1] / "results" / "mutants.md"
REASONS = Path(__file__).parents[1] / "data" / "equal_mutants.json"
NEAREST = {
    "cost": ("cost", "planning/test_estimates.py", "planning/test_serving_plan.py"),
    "graph": ("graph", "planning/price", "planning/space"),
    "planning/price": (
        "planning/price",
        "planning/test_make.py",
        "planning/test_cudnn.py",
        "planning/explain/test_explain.py",
        "planning/space",
        "planning/solve",
    ),
    "planning/xla": ("planning/xla", "planning/test_spatial.py", "planning/space", "planning/price"),
    "solver": ("solver",),
    "exec/apply": ("exec/apply", "exec/test_modules.py", "exec/test_own_specs.py", "exec/test_weights.py"),
    "program": ("program", "exec/test_attention_parts.py"),
}
"""Folders and files of tests that are nearest to each room."""
MOST_LEFT = 0.15
"""Share of all mutants that may survive without a reason."""
QUICK_S, WHOLE_S = 20.0, 30.0
"""Recorded seconds of tests that run the line, and of the remaining tests of their files."""
LIMIT_S, COMPILING_S, FILE_S = 120, 300, 60
"""Processor seconds for a mutant's tests, for those if numba compiles again, and for a file that is recorded."""
TOGETHER = 8
"""Number of test files that one process records."""
WAIT_S = 1800.0
"""Wall-clock limit in seconds for each of these runs, since other programs may keep the machine busy."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=29, metavar="N", help="mutants of each room (default: 29)")
    parser.add_argument("--minutes", type=float, default=1e9, metavar="M", help="start no mutant after this time")
    parser.add_argument("--again", action="store_true", help="run survivors again that have no reason")
    parser.add_argument("--room", nargs="+", choices=NEAREST, default=list(NEAREST), help="these rooms only")
    options = parser.parse_args()
    end = time.monotonic() + options.minutes * 60
    results, reasons = Results(TABLE.with_suffix(".json")), json.loads(REASONS.read_text())
    by_room = {room: drawn(ROOT / "autoshard", room, options.each) for room in NEAREST}
    # Rooms take turns, so that a run that is cut short has tried every room.
    turns = [each for turn in itertools.zip_longest(*(by_room[room] for room in options.room)) for each in turn if each]
    left = [each for each in turns if each.key not in results.rows]
    left += [each for each in turns if options.again and is_left(each.key, results.rows, reasons)]
    if left:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copy = copied(Path(folder))
            for mutant in left:
                if time.monotonic() < end:
                    results.keep(mutant.key, {"room": mutant.room, "line": mutant.line} | outcome(copy, mutant))
                    print(results.rows[mutant.key]["kind"], mutant.key, flush=True)
    rows = {each.key: results.rows[each.key] for each in itertools.chain(*by_room.values()) if each.key in results.rows}
    TABLE.write_text(table(rows, reasons))
    print(TABLE.read_text())
    return 1 if sum(is_left(key, rows, reasons) for key in rows) > MOST_LEFT * len(rows) else 0


def is_left(key: str, rows: dict[str, Any], reasons: dict[str, str]) -> bool:
    return key in rows and rows[key]["kind"] == "survived" and key not in reasons


def copied(folder: Path) -> Path:
    """Copy the files of the checkout into `folder`, so that programs there import the copy."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    # Numba's cache stays valid for files that are equal.
    for path in (ROOT / "autoshard").rglob("__pycache__/*.nb?"):
        (folder / path.parent.relative_to(ROOT)).mkdir(exist_ok=True)
        shutil.copy2(path, folder / path.relative_to(ROOT))
    return folder


def pytest(copy: Path, limit: int, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run tests in the copy within `limit` processor seconds; return the exit code and the output.

    The exit code is negative if the tests did not end.
    """
    paths = {"PYTHONPATH": f"{copy}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        # The shell sets its own limits, because JAX's threads allow no Python code between fork and exec.
        [
            "sh",
            "-c",
            f'ulimit -S -t {limit}; ulimit -H -t {limit + 30}; exec "$@"',
            "sh",
            sys.executable,
            "-m",
            "pytest",
        ]
        + ["-q", "-p", "no:cacheprovider", *arguments],
        cwd=copy,
        env={**os.environ, **paths, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
    return process.returncode, text


def maps(copy: Path, room: str, changed: str) -> list[dict[str, Any]]:
    """Return the tests and lines of each test file near a room, recorded for the present text of both files."""
    places = [copy / "tests" / place for place in NEAREST[room]]
    tests = [test for place in places for test in ([place] if place.suffix else sorted(place.glob("test_*.py")))]
    paths = {test: BUILD / "mutants" / f"{test.stem}-{_digest(test)}.json" for test in tests}
    known = {test: json.loads(path.read_text()) for test, path in paths.items() if path.exists()}
    text = _digest(copy / "autoshard" / changed)
    missing = [test for test in tests if test not in known or known[test]["texts"].get(changed) != text]
    for first in range(0, len(missing), TOGETHER):
        known |= _record(copy, {test: paths[test] for test in missing[first : first + TOGETHER]})
    return [known[test] for test in tests]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _record(copy: Path, paths: dict[Path, Path]) -> dict[Path, dict[str, Any]]:
    """Run test files in one process and write the map of each file."""
    names = {test: str(test.relative_to(copy)) for test in paths}
    # Python imports `sitecustomize` at startup, in the child processes of a test too.
    (copy / "sitecustomize.py").write_text(
        f"import os\nif {CHILD_OF!r} in os.environ:\n    import experiments.lib.line_map\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.json"
        _, text = pytest(
            copy, FILE_S * len(paths), "-p", "experiments.lib.line_map", *names.values(), LINE_MAP=str(path)
        )
        ran = json.loads(path.read_text()) if path.exists() else {"seconds": {}, "lines": {}}
    (copy / "sitecustomize.py").unlink()
    print(*names.values(), *text.splitlines()[-1:], flush=True)
    package = copy / "autoshard"
    texts = {str(file.relative_to(package)): _digest(file) for file in package.rglob("*.py")}
    result = {}
    for test, path in paths.items():
        seconds = {each: s for each, s in ran["seconds"].items() if each.startswith(f"{names[test]}::")}
        place = {each: number for number, each in enumerate(["", *seconds])}
        lines = {
            file: {line: [place[each] for each in tests if each in place] for line, tests in by_line.items()}
            for file, by_line in ran["lines"].items()
        }
        text = test.read_text()
        result[test] = {
            "seconds": [0.0, *seconds.values()],
            "tests": [*place],
            "lines": lines,
            "texts": texts,
            "text": text,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result[test]))
    return result


def chosen(copy: Path, mutant: Mutant) -> tuple[list[str], list[str]]:
    """Return the tests that run a line, and the other tests of their files, quickest first.

    The second list has all nearby tests if no test runs the line.
    """
    calls = _calls(copy / "autoshard", mutant)
    running: dict[str, float] = {}
    others: dict[str, float] = {}
    every: dict[str, float] = {}
    for each in maps(copy, mutant.room, mutant.path):
        seconds = {name: s for name, s in zip(each["tests"], each["seconds"], strict=True) if name}
        lines = each["lines"].get(mutant.path, {})
        numbers = set(lines.get(str(mutant.line), ()))
        if numbers == {0}:  # the line ran only while the file was imported
            numbers = set(itertools.chain(*lines.values()))
        for path, called in calls.items():
            numbers |= set(itertools.chain(*(each["lines"].get(path, {}).get(str(line), ()) for line in called)))
        names = {each["tests"][number] for number in numbers} - {""}
        if calls and Path(mutant.path).stem in each["text"]:
            names = set(seconds)
        running |= {name: seconds[name] for name in names}
        others |= seconds if names else {}
        every |= seconds
    others = {name: s for name, s in (others or every).items() if name not in running}
    return _within(running, QUICK_S), _within(others, WHOLE_S)


def _within(seconds: dict[str, float], most: float) -> list[str]:
    """Return the quickest tests that the time allows, but at least one."""
    names = sorted(seconds, key=lambda name: seconds[name])
    sums = itertools.accumulate(seconds[name] for name in names)
    return [name for name, total in zip(names, sums, strict=True) if total <= most] or names[:1]


def _calls(package: Path, mutant: Mutant) -> dict[str, list[int]]:
    """Return the lines that call a mutant's numba-compiled function, since its own lines cannot be recorded."""
    name, stem = mutant.function.partition(".")[0], Path(mutant.path).stem
    if not re.search(rf"^@njit.*\ndef {name}\(", (package / mutant.path).read_text(), re.MULTILINE):
        return {}
    texts = {path: path.read_text() for path in package.rglob("*.py") if "njit" in path.read_text()}
    compiled = re.findall(r"^@njit.*\ndef (\w+)((?:.*\n(?![\w@#]))+)", "\n".join(texts.values()), re.MULTILINE)
    names = {name}
    for _ in compiled:
        names |= {caller for caller, body in compiled if re.search(rf"\b({'|'.join(names)})\(", body)}
    called = re.compile(rf"\b({'|'.join(names)})\(")
    result = {}
    for path in package.rglob("*.py"):
        text = path.read_text()
        lines = [number for number, line in enumerate(text.split("\n"), 1) if called.search(line)]
        if lines and (stem in text or path in texts):
            result[str(path.relative_to(package))] = lines
    return result


def outcome(copy: Path, mutant: Mutant) -> dict[str, Any]:
    """Run the tests of a mutant until one fails."""
    first, then = chosen(copy, mutant)
    started = time.monotonic()
    with changed(copy, mutant) as limit:
        for tests in filter(None, (first, then)):
            code, text = pytest(copy, limit, "-x", *tests)
            failed = re.search(r"^(?:FAILED|ERROR) (.*)", text, re.MULTILINE)
            if code < 0 or code in (1, 2) or (code == 4 and failed):
                words = (failed[1] if failed else text[-200:])[:200]
                kind = "timed out" if -code in (signal.SIGXCPU, signal.SIGKILL) else "killed"
                return {"kind": kind, "text": words, "seconds": round(time.monotonic() - started)}
            if code:
                raise RuntimeError(text)
    seconds = round(time.monotonic() - started)
    return {"kind": "survived", "text": f"{len(first)} + {len(then)} tests", "seconds": seconds}


@contextlib.contextmanager
def changed(copy: Path, mutant: Mutant) -> Iterator[int]:
    """Change the copy while inside; yield the seconds that the tests have."""
    package = copy / "autoshard"
    file = package / mutant.path
    original = file.read_bytes()
    # Callers that numba compiled before contain the original function.
    compiled = [path for path in package.rglob("*.py") if b"@njit" in path.read_bytes()] if b"@njit" in original else []
    callers = _callers(file, compiled)
    stamps = {path: path.stat() for path in (file, *callers)}
    kept = {path: path.read_bytes() for each in stamps for path in each.parent.glob(f"__pycache__/{each.stem}.*.nb?")}
    try:
        file.write_bytes(mutant.source(original))
        for path in stamps:
            os.utime(path)
        yield COMPILING_S if compiled else LIMIT_S
    finally:
        file.write_bytes(original)
        for path, stamp in stamps.items():
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
            for each in path.parent.glob(f"__pycache__/{path.stem}.*.nb?"):
                each.unlink()
        for path, content in kept.items():
            path.write_bytes(content)


def _callers(file: Path, compiled: list[Path]) -> set[Path]:
    """Return the compiled files that import `file`, directly or through another compiled file."""
    names, count = {file.stem}, 0
    while count != len(names):
        count = len(names)
        imports = re.compile(rf"\b({'|'.join(names)}) import ")
        names |= {path.stem for path in compiled if imports.search(path.read_text())}
    return {path for path in compiled if path.stem in names} - {file}


def table(rows: dict[str, Any], reasons: dict[str, str]) -> str:
    """Return the score by room, and every survivor with its reason."""
    lines = ["# Small changes of the core that tests notice", ""]
    lines += ["| room | mutants | killed | timed out | equal (argued) | left | score |", "| --- " * 7 + "|"]
    for room in (*NEAREST, "all"):
        lines.append(_line(room, {key: row for key, row in rows.items() if room in (row["room"], "all")}, reasons))
    survivors = {key: row for key, row in rows.items() if row["kind"] == "survived"}
    lines += ["", "| survivor | ran | reason |", "| --- | --- | --- |"] if survivors else []
    for key, row in survivors.items():
        cells = (f"`{key}`", row["text"], reasons.get(key, "**left**"))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _line(room: str, rows: dict[str, Any], reasons: dict[str, str]) -> str:
    kinds = collections.Counter(row["kind"] for row in rows.values())
    left = sum(is_left(key, rows, reasons) for key in rows)
    cells: Iterable[object] = (len(rows), kinds["killed"], kinds["timed out"], kinds["survived"] - left, left)
    score = f"{100 * (len(rows) - left) / len(rows):.0f} %" if rows else ""
    return f"| {room} | " + " | ".join(map(str, cells)) + f" | {score} |"


if __name__ == "__main__":
    sys.exit(main())
