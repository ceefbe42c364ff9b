"""Insertion of the verdict, the plan and the baselines that `make demo` prints into README.md, between its two markers.

make demo > build/demo.txt && python experiments/lib/readme.py build/demo.txt
"""

import re
import sys
from pathlib import Path


README = Path(__file__).parents[2] / "README.md"
SHOWN = ("llama3-8b training", "FITS", "Plan\n", "Baselines\n")
"""First words of the parts of the output that the README shows."""

START, END = "<!-- demo: written by `make readme` -->\n", "<!-- end of demo -->"


def main() -> None:
    (source,) = sys.argv[1:]
    lines = [line.rstrip() for line in Path(source).read_text(encoding="utf-8").splitlines()]
    output = "\n".join(line for line in lines if not re.match(r"(mkdir|make|\S*bin/autoshard|\t)", line)).strip()
    text = README.read_text(encoding="utf-8")
    output = "\n\n".join(part for part in output.split("\n\n") if part.startswith(SHOWN))
    head, rest = text.split(START)
    _, tail = rest.split(END)
    README.write_text(f"{head}{START}```\n{output}\n```\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
