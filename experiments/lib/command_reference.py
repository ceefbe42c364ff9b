"""Write the tables of commands and flags in docs/command.md from the parser, between the page's two markers.

python experiments/lib/command_reference.py
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from autoshard.cli.parser import build_parser


PAGE = Path(__file__).parents[2] / "docs" / "command.md"
START, END = "<!-- written by experiments/lib/command_reference.py -->\n", "<!-- end of the written part -->"
SHARED_BY = 3
"""Commands that must share a flag for its row to stand in a table of shared flags."""

SETS: dict[tuple[str, ...], str] = {
    ("plan", "measure", "compile", "compare", "sweep", "refine", "graph"): "all with a program",
    (
        "plan",
        "measure",
        "compile",
        "compare",
        "sweep",
        "estimate",
        "refine",
        "graph",
    ): "all with a program, `estimate`",
    ("plan", "measure", "compare", "sweep", "refine"): "all that plan",
}
"""Short words for frequent sets of commands."""

TITLES = {
    "options": "Flags of several commands",
    "for hf:CONFIG": "Flags of the program",
    "planning": "Flags of planning",
}
"""Heading of a table of shared flags, by the title of argparse's group."""

Row = tuple[str, str]
"""Flags with their value, and their meaning."""


def cell(text: str) -> str:
    """Return text as a cell of a table."""
    return text.replace("|", "\\|").replace("*", "\\*")


def flags(action: argparse.Action) -> str:
    """Return a flag with its value, as a cell."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    value = f" [{value}]" if action.nargs == "?" else "" if action.nargs == 0 else f" {value}"
    names = ", ".join(action.option_strings) or ""
    return "`" + f"{names}{value}".strip().replace("|", "\\|") + "`"


def meaning(action: argparse.Action) -> str:
    """Return the help text without the remark that `auto` leaves the choice to the planner."""
    return cell(re.sub(r"; auto: .*", "", action.help or ""))


def by_group(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield the flags and positional arguments of a command with the title of their group."""
    for group in parser._action_groups:
        for action in group._group_actions:
            if not isinstance(action, argparse._HelpAction):
                yield group.title or "", action


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def reference() -> str:
    """Return the tables: commands, shared flags by group, and the flags of each command."""
    (choices,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    summaries = {each.dest: each.help or "" for each in choices._choices_actions}
    actions = {name: list(by_group(parser)) for name, parser in choices.choices.items()}

    plain = {(flags(action), meaning(action)) for each in actions.values() for _, action in each}
    users: dict[Row, list[str]] = {}
    groups: dict[Row, str] = {}
    auto: dict[Row, list[str]] = {}
    shown: dict[str, list[tuple[Row, argparse.Action]]] = {name: [] for name in actions}
    for name, each in actions.items():
        for title, action in each:
            row = flags(action), meaning(action)
            fixed = row[0].replace("\\|auto`", "`"), row[1]  # the same flag of a command without `auto`
            row = fixed if fixed in plain else row
            shown[name].append((row, action))
            users.setdefault(row, []).append(name)
            groups.setdefault(row, title)
            if "; auto: " in (action.help or ""):
                auto.setdefault(row, []).append(name)
    shared = {row for row, names in users.items() if len(names) >= SHARED_BY and not row[0].startswith("`PROGRAM")}

    parts = ["## Commands\n\n"]
    rows = []
    for name, each in actions.items():
        arguments = " ".join(flags(action).strip("`") for _, action in each if not action.option_strings)
        rows.append((f"[`autoshard {name} {arguments}`](#autoshard-{name})".replace(" `", "`"), cell(summaries[name])))
    parts.append(table(("command", "what it does"), rows))

    openers, planners = (", ".join(f"`{name}`" for name in names) for names in (next(iter(SETS)), list(SETS)[-1]))
    parts.append(f"\nAll with a program: {openers}. All that plan: {planners}.\n")
    for title in dict.fromkeys(groups[row] for row in groups if row in shared):
        heading = TITLES.get(title, title[0].upper() + title[1:].split(" (")[0].split(";")[0])
        lines = []
        for row in (row for row in groups if row in shared and groups[row] == title):
            listed = SETS.get(tuple(users[row]), ", ".join(f"`{name}`" for name in users[row]))
            names = "all" if len(users[row]) == len(actions) else listed
            chosen = "; `auto` in " + " and ".join(f"`{name}`" for name in auto[row]) if row in auto else ""
            lines.append((row[0], row[1], names + chosen))
        parts.append(f"\n## {heading}\n\n" + table(("flag", "meaning", "commands"), lines))

    parts.append("\n## Flags of one command\n")
    for name, each in shown.items():
        rows = [(row[0], _own(action)) for row, action in each if row not in shared]
        parts.append(f"\n### `autoshard {name}`\n\n{summaries[name][0].upper()}{summaries[name][1:]}.\n\n")
        parts.append(table(("argument or flag", "meaning"), rows) if rows else "It has shared flags only.\n")
        if last_help := choices.choices[name].last_help:
            parts.append(f"\n```text\n{last_help()}```\n")
    return "".join(parts)


def _own(action: argparse.Action) -> str:
    """Return the whole help text, and a remark if the flag is required."""
    return cell(action.help or "") + (" (required)" if action.required and action.option_strings else "")


def page(text: str) -> str:
    """Return the page with its written part replaced."""
    head, rest = text.split(START)
    _, tail = rest.split(END)
    return f"{head}{START}\n{reference()}\n{END}{tail}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
