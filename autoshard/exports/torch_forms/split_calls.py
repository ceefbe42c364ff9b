"""Code in exports to DTensor that splits torch functions as `plan.distribute` does: by the same source."""

import ast
import functools
from pathlib import Path

from autoshard import exec as room


def split_sentence(mesh: str) -> str:
    """Return the line about `SplitOps` in the head of an export; `mesh` is the code of the mesh that it splits over."""
    return (
        "functions that DTensor cannot split, or computes wrongly, as their first call is tried; every device runs "
        "them whole. `plan.distribute(model, mesh)` also places what the plan has inside of the step. A loss outside "
        "of the model runs on DTensors alone, where some functions fail (`F.mse_loss` in torch 2.9, a label "
        f"smoothing): call it within `with SplitOps({mesh}):` of this file, or move it into the model."
    )


SPLIT_IMPORTS = """import torch
from torch.distributed.tensor import DTensor
"""
"""Imports of the code in which `split_calls` stands."""

SPLIT_CALLS = '''

def split_calls(model, mesh):
    """Run torch functions on DTensors with `SplitOps` of this file, while a module of the model runs."""
    ops, depth = SplitOps(mesh), [0]

    @torch.compiler.disable
    def enter(module, args):
        if not depth[0]:
            ops.__enter__()
        depth[0] += 1

    @torch.compiler.disable
    def leave(module, args, output):
        depth[0] -= 1
        if not depth[0]:
            ops.__exit__(None, None, None)
        return map_outputs(settle, output) if module is model else None

    for module in model.modules():  # a checkpoint calls a module within the model again
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        module.forward = UncompiledForward(module)


def place_gradients(model):
    """Sum the parts of every gradient, and split it as its parameter: norms of gradients then count them once."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_hook(PlacedGradient(parameter.placements))

'''
"""Code of functions that start to split a model's functions, and place its gradients."""

_FILES = ("uncompiled", "split_trial", "shared_memory", "split_functions", "split_ops")
"""Files of `autoshard.exec.dtensor` with the code; a file needs those before it."""
_LEFT_OUT = {"is_experts", "ExpertHooks"}
"""Names in them that no function of an export needs."""


@functools.cache
def split_source() -> str:
    """Return the code of `SplitOps` and of all that it needs, with its imports."""
    imports: dict[str, set[str]] = {}
    parts: list[str] = []
    for name in _FILES:
        text = Path(room.__path__[0], "dtensor", f"{name}.py").read_text("utf-8")
        body = ast.parse(text).body[1:]
        for node in body:
            if isinstance(node, ast.Import):
                imports |= {f"import {alias.name}": set() for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("autoshard"):
                imports.setdefault(f"from {node.module}", set()).update(alias.name for alias in node.names)
        parts.append(_without_imports(text, body))
    lines = [f"{start} import {', '.join(sorted(names))}" if names else start for start, names in imports.items()]
    return "\n\n# Functions on DTensors\n\n" + "\n".join(sorted(lines)) + "\n\n\n" + "\n\n\n".join(parts) + "\n"


def _without_imports(text: str, body: list[ast.stmt]) -> str:
    """Return the text of a module from its first statement after the imports, without the names of `_LEFT_OUT`."""
    lines = text.splitlines()
    first = next(node for node in body if not isinstance(node, ast.Import | ast.ImportFrom))
    start = _first_line(first)
    for node in reversed(body):
        if getattr(node, "name", "") in _LEFT_OUT:
            lines[_first_line(node) : node.end_lineno] = []
    kept = "\n".join(lines[start:]).strip()
    while "\n\n\n\n" in kept:
        kept = kept.replace("\n\n\n\n", "\n\n\n")
    return kept


def _first_line(node: ast.stmt) -> int:
    """Return the number, from 0, of a statement's first line, which may be a decorator's."""
    decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
    return min([node.lineno, *decorators]) - 1
