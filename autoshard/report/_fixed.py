"""What was fixed before anything was chosen: by whoever planned, and by the program itself."""

from autoshard.plan import Plan


SHOWN = 6
"""Lines of the program's own that are shown; the rest is counted."""


def fixed_lines(plan: Plan) -> tuple[str, ...]:
    """One line for each thing that was asked for, then for each spec that the program fixes."""
    pinned: dict[str, str] = plan.provenance.get("pinned", {})
    lines = []
    for asked in plan.provenance.get("asked", []):
        count = sum(asked in why for why in pinned.values())
        lines.append(f"pinned by you: {asked}" + (f" ({count} tensor{'s' if count > 1 else ''})" if count else ""))
    said: list[str] = plan.provenance.get("said_by_program", [])
    lines += [f"fixed by the program: {line}" for line in said[:SHOWN]]
    if len(said) > SHOWN:
        lines.append(f"and {len(said) - SHOWN} more fixed by the program")
    return tuple(lines)
