"""A random torch module traced as a training step, against a module of the same recipe in eager torch."""

import dataclasses
import warnings
from typing import Any

import torch

from autoshard.errors import UserError
from autoshard.exec.run.eager_check import check_eager
from autoshard.program import from_torch
from tests.random_modules import WORDS, Recipe, allowed, build, inputs, loss


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one module's check."""

    kind: str
    """`equal`, `refused`, `differs`, `raised`, or `changed`: the step is right, but the user's module has changed."""
    text: str = ""


def run(recipe: Recipe) -> Outcome:
    """Trace the module of `recipe`. Compare the step with eager torch, and the module with its earlier state."""
    module, reference = build(recipe), build(recipe)
    args, kwargs = inputs(recipe)
    held = _held(module)
    before = {name: (value, value.clone() if isinstance(value, torch.Tensor) else None) for name, value in held.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = from_torch(module, args, kwargs, train=True, loss=loss)
    except UserError as error:
        return _left(module, before) or Outcome("refused", str(error))
    except Exception as error:
        return Outcome("raised", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    try:
        eager = dataclasses.replace(program.eager.eager, rebuild=lambda seed: reference)
        twin = dataclasses.replace(program.eager, eager=eager)
        check = check_eager(dataclasses.replace(program, eager=twin))
    except Exception as error:
        return Outcome("raised", f"when it runs: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if check.skipped:
        return Outcome("raised", check.skipped)
    if not check.agrees:
        wrong = [each for each in check.differences if not each.within]
        worst = max(wrong, key=lambda each: each.rel_diff)
        text = f"{worst.kind} {worst.name} by {worst.rel_diff:.2g} ({len(wrong)} of {len(check.differences)} tensors)"
        return Outcome("differs", text)
    if set(check.compared) - {"buffer"} != {"loss", "gradient"}:
        return Outcome("raised", f"only {check.compared} were compared")
    return _left(module, before) or _called(module, reference, args, kwargs) or Outcome("equal")


def cut_down(recipe: Recipe, outcome: Outcome) -> tuple[Recipe, Outcome]:
    """Return the smallest recipe whose module fails in the same way, and its outcome."""
    for name in (*recipe.words, *recipe.words):
        plain = 2 if name == "layers" else WORDS[name][0]
        smaller = allowed(dataclasses.replace(recipe, **{name: plain}))
        if len(smaller.words) < len(recipe.words) or name == "layers" and smaller != recipe:
            found = run(smaller)
            if found.kind == outcome.kind and ("mode" in found.text) == ("mode" in outcome.text):
                recipe, outcome = smaller, found
    return recipe, outcome


def _called(module: Any, reference: Any, args: Any, kwargs: Any) -> Outcome | None:
    """Compare a later call of the user's module with one of a module that was never traced."""
    with torch.no_grad():
        try:
            same = torch.equal(module.eval()(*args, **kwargs), reference.eval()(*args, **kwargs))
        except Exception as error:
            return Outcome("changed", f"a call raises {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    return None if same else Outcome("changed", "a call computes something else")


def _held(module: Any) -> dict[str, Any]:
    """Return all attributes of the submodules of `module` by name: objects by identity, tensors with their values."""
    held: dict[str, Any] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for key, value in child.__dict__.items():
            held[f"{path}.{key}"] = value
            if isinstance(value, dict | list):
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                held |= {f"{path}.{key}[{name}]": each for name, each in pairs}
    return held


def _left(module: Any, before: dict[str, Any]) -> Outcome | None:
    """Compare a module with its attributes before it was traced."""
    after = _held(module)
    changed = [name for name in before if name in after and after[name] is not before[name][0]]
    gone, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    written = [
        name
        for name, (value, copy) in before.items()
        if copy is not None and name not in changed and name not in gone and not torch.equal(value, copy)
    ]
    modes = [name for name in changed if name.endswith(".training")]
    others = [name for name in changed if name not in modes]
    for word, names in (("gone", gone), ("replaced", others), ("new", new), ("written", written), ("mode", modes)):
        if names:
            return Outcome(
                "changed", f"{word}: {names[0].removeprefix('.')}" + (f" and {len(names) - 1} more" * (len(names) > 1))
            )
    return None


def run_planned(recipe: Recipe) -> str:
    """Plan the step of `recipe` for 8 CPU devices and run it: `split`, `whole`, `refused: ...` or `differs: ...`.

    Such a small step is fastest on one device. The batch and the head are pinned, so that tensors are split.
    """
    from autoshard import plan
    from autoshard.exec import measure

    args, kwargs = inputs(recipe)
    given = {**dict(zip(("x", "other"), args, strict=False)), **kwargs}
    pins = {f"batch.{name}": "data" + ",None" * (value.ndim - 1) for name, value in given.items()}
    pins |= {"head.weight": "model,None"}
    planned, reason = None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = from_torch(build(recipe), args, kwargs, train=True, loss=loss, optimizer="sgd")
        except UserError as error:
            return f"refused: {error}"
        while planned is None:
            try:
                planned = plan(program, topology="cpu:8", mesh={"data": 4, "model": 2}, pins=pins, time_limit=10.0)
            except UserError as error:
                reason = reason or str(error)
                if not pins:
                    return f"refused: {reason}"
                pins.popitem()
        check = measure(program, planned, steps=1, warmup=0, check=True).check
    if check is None or not check.passed:
        return f"differs: {check and check.worst}"
    specs = (*planned.arguments.values(), *planned.results.values(), *(pin.spec for pin in planned.pins))
    return "split" if any(spec.axes for spec in specs) else "whole"
