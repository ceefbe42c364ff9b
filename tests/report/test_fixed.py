"""Fixed specs are listed: in the terminal, on the page and in the figures."""

import dataclasses
import io

from rich.console import Console

from autoshard.planning import Plan
from autoshard.report import html_report, plan_figures, terminal_report


def fixed(plan: Plan) -> Plan:
    provenance = plan.provenance | {
        "asked": ["--pin *.up=model,None", "--axis-only data=batch"],
        "pinned": {"params.a.up": "--pin *.up=model,None", "params.b.up": "--pin *.up=model,None"},
        "said_by_program": [f"with_sharding_constraint at model.py:{line}: [data, -]" for line in range(8)],
    }
    return dataclasses.replace(plan, provenance=provenance)


def test_reports_say_that_prices_were_learned(plan: Plan) -> None:
    learned = {"hash": "0", "observations": 4, "figures": {"launch_s": 1e-6}}
    line = f"figures fitted to 4 observations of {plan.topology} by autoshard refine; --no-calibration ignores them"
    for record, wanted in ((learned, line), (learned | {"figures": {}}, ""), (None, "")):
        told = dataclasses.replace(plan, provenance=plan.provenance | {"learned": record})
        console = Console(width=140, record=True, file=io.StringIO())
        console.print(terminal_report(told))
        assert (f"PRICES: {line}" in console.export_text()) == bool(wanted)
        assert (f"<bdi>{line}</bdi>" in html_report(told)) == bool(wanted)
        assert plan_figures(told)["prices_line"] == wanted


def test_reports_list_what_was_fixed(plan: Plan) -> None:
    lines = plan_figures(fixed(plan))["fixed"]
    assert lines[:3] == [
        "pinned by you: --pin *.up=model,None (2 tensors)",
        "pinned by you: --axis-only data=batch",
        "fixed by the program: with_sharding_constraint at model.py:0: [data, -]",
    ]
    assert lines[-1] == "and 2 more fixed by the program" and len(lines) == 9
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal_report(fixed(plan)))
    assert "pinned by you: --pin *.up=model,None (2 tensors)" in console.export_text()
    assert "<bdi>pinned by you: --axis-only data=batch</bdi>" in html_report(fixed(plan))
    assert plan_figures(plan)["fixed"] == [] and "Fixed beforehand" not in html_report(plan)
