"""Export of a plan to lines with HLO's own syntax of shardings."""

import json
import re

from autoshard.exports.export_text import head, unpinned
from autoshard.exports.form_writers import writes
from autoshard.planning import Plan, hlo_sharding


@writes("hlo")
def hlo_text(plan: Plan, sentence: str) -> str:
    """Return the plan's shardings in HLO's syntax, one line for each argument and result."""
    order = ",".join(map(str, plan.device_order))
    lines = [head(plan, unpinned(plan), sentence), f"# device assignment (numbers in the topology's order): {order}\n"]
    for kind, specs in (("argument", plan.arguments), ("result", plan.results)):
        lines += [f"{kind} {_word(name)} {hlo_sharding(spec, plan.mesh)}\n" for name, spec in specs.items()]
    return "".join(lines)


def _word(name: str) -> str:
    """Return a name as one word of a line; a name with spaces or quotes is written as JSON."""
    return name if name.isprintable() and not re.search(r'[\s"{}\\]', name) and name else json.dumps(name)
