"""A plan as code or configuration for other frameworks, with one module for each form."""

from autoshard.exports.plan_exports import Export as Export
from autoshard.exports.plan_exports import export_plan as export_plan
from autoshard.exports.plan_exports import make_export as make_export
