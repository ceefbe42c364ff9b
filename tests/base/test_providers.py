"""Methods of a plan that save, explain, run and show it: they load code that the record does not import."""

import importlib
import subprocess
import sys

import pytest

from autoshard.base.providers import HOMES, provider, provides
from autoshard.planning import Plan, explain_plan, save_plan


@pytest.mark.heavy
@pytest.mark.few(2)
@pytest.mark.parametrize("request_", sorted(HOMES))
def test_a_request_loads_the_module_that_provides_it(request_: str):
    """Load the module in a process that has imported the record alone."""
    code = (
        "import sys\n"
        "from autoshard.base.providers import HOMES, _providers, provider\n"
        f"_providers.clear(); sys.modules.pop(HOMES[{request_!r}], None)\n"
        f"print(provider({request_!r}).__module__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().startswith(HOMES[request_])


def test_providers_are_the_public_functions():
    assert provider("save") is save_plan
    assert provider("explain") is explain_plan
    assert provider("run") is importlib.import_module("autoshard.exec").Application


def test_only_what_plans_ask_for_can_be_provided():
    with pytest.raises(
        ValueError, match="a plan is never asked to dance; it is asked to eager_price, explain, graph, run, save, view"
    ):
        provides("dance")(Plan)
