"""What of a plan decides how its program is run: equal digests are one plan, whatever was predicted of it."""

import hashlib
import json

from autoshard.plan.record._plan import Plan
from autoshard.plan.record._store import plan_to_json


_DECIDES = ("topology", "mesh", "device_order", "arguments", "results", "pins", "calls", "regions")


def plan_digest(plan: Plan) -> str:
    """Twelve hex digits of the specs of arguments, results and pins, and of the devices that they are laid on."""
    said = json.loads(plan_to_json(plan))
    text = json.dumps([plan.program_fingerprint, {key: said[key] for key in _DECIDES}], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
