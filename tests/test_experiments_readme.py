"""The table of experiments is complete: it has each script once, and each result that it names exists."""

import re
from pathlib import Path


ROOT = Path(__file__).parent.parent / "experiments"
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[(\w+)\.py\]\((\S+)\) \| .+ \| `python experiments/(\S+?)(?: .*)?` \| ", TEXT, re.MULTILINE)


def test_each_script_stands_in_one_row_with_its_own_command():
    scripts = [path.relative_to(ROOT) for path in ROOT.glob("*/*.py") if path.parent.name != "lib"]
    assert sorted(link for _, link, _ in ROWS) == sorted(map(str, scripts))
    assert [row for row in ROWS if row[1] != row[2] or Path(row[1]).stem != row[0]] == []


def test_each_file_that_it_links_exists():
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) > 100
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_each_table_of_results_stands_in_one_row():
    tables = {path.name for path in (ROOT / "results").glob("*.md")}
    named = re.findall(r"\]\(results/(\w+\.md)\)", TEXT)
    assert sorted(named) == sorted(tables)


def test_bench_runs_every_folder_of_the_table():
    (folders,) = re.findall(
        r"^EXPERIMENTS := (.*)$", (ROOT.parent / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    sections = re.findall(r"^## (\w+)$", TEXT, re.MULTILINE)
    assert [*folders.split(), "lib"] == sections


def test_no_folder_of_scripts_is_large():
    counts = {folder: len([*folder.glob("*.py")]) for folder in ROOT.rglob("*") if folder.is_dir()}
    assert {str(folder): count for folder, count in counts.items() if count > 22} == {}
