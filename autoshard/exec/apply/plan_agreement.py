"""Checks that a program agrees with a plan: arguments, results, computation and recipe."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.planning import Plan, Spec, kept_program, spec_text
from autoshard.program import pipelined, read_pipeline, with_active_pipeline


def other_program(plan: Plan, module: bytes | None = None) -> str:
    """Return the error message for a program whose arguments agree with the plan but whose computation does not.

    It names both jax versions if the plan was made with another one. `module` is the program's serialised module. If
    the disk cache has the planned one and only constants differ, the message says so.
    """
    import jax

    planned_version = plan.origin.jax_version
    version = (
        f" (the plan was made with jax {planned_version}, this is {jax.__version__})"
        if planned_version not in (None, jax.__version__)
        else ""
    )
    kept = None if module is None else kept_program(plan)
    agree = f"the plan is for another program: its arguments agree with {plan.program_name}, but"
    if module is not None and kept is not None and _skeleton(kept.module) == _skeleton(module):
        return (
            f"{agree} a constant in the computation differs{version}, such as a random buffer with persistent=False: "
            "make it the same each time, or an argument (persistent=True), and plan it again."
        )
    return f"{agree} the computation has changed{version}; plan it again."


def _skeleton(module: bytes) -> str:
    """Return the text of a serialised module without the values of its constants."""
    from autoshard import mlir

    return _VALUES.sub("dense<>", mlir.canonical_text(mlir.inline_calls(mlir.parse_module(module))))


_VALUES = re.compile(r"dense(?:_resource)?<[^>]*>")
"""Values of a constant in MLIR text."""


def check_arguments(plan: Plan, leaves: Sequence[tuple[Any, Any]]) -> None:
    """Compare flat arguments, pairs (path, abstract array), with those of the plan by shape and dtype, in order.

    Raises `UserError` that names the first argument that differs, is missing or has no place in the plan. Raises it
    also for an argument that the plan does not split evenly.
    """
    import jax

    names = list(plan.arguments)
    for name, (path, leaf) in zip(names, leaves, strict=False):
        actual = (tuple(leaf.shape), str(leaf.dtype))
        if actual != (plan.shapes[name], plan.dtypes[name]):
            raise UserError(
                f"the plan is for another program: argument `{name}` is "
                f"{_typed(plan.shapes[name], plan.dtypes[name])} in the plan, but args{jax.tree_util.keystr(path)} "
                f"is {_typed(*actual)}; plan it again."
            )
    if len(names) != len(leaves):
        extra = (
            f"the plan's `{names[len(leaves)]}` is missing"
            if len(names) > len(leaves)
            else f"args{jax.tree_util.keystr(leaves[len(names)][0])} is not in the plan"
        )
        raise UserError(
            f"the plan is for another program: it has {len(names)} arguments, this one {len(leaves)} ({extra}); "
            "plan it again."
        )
    for name, spec in plan.arguments.items():
        check_even(plan, f"argument `{name}`", plan.shapes[name], spec)


def check_results(plan: Plan, leaves: Sequence[Any]) -> None:
    """Compare flat results with those of the plan by number and by their numbers of dims, and check that shards are
    even.

    Sizes and dtypes are not compared. Raises `UserError` for the first difference.
    """
    if len(leaves) != len(plan.results):
        raise UserError(
            f"the plan is for another program: it has {len(plan.results)} results, this one {len(leaves)}; "
            "plan it again."
        )
    for (name, spec), leaf in zip(plan.results.items(), leaves, strict=True):
        if len(spec.dims) != len(leaf.shape):
            raise UserError(
                f"the plan is for another program: result `{name}` has {len(spec.dims)} dims in the plan, "
                f"here {len(leaf.shape)}; plan it again."
            )
        check_even(plan, f"result `{name}`", leaf.shape, spec)


def check_even(plan: Plan, what: str, shape: Sequence[int], spec: Spec) -> None:
    """Raise `UserError` if a spec does not split a shape evenly: JAX places only even shards.

    - `plan`: plan whose mesh has the sizes of the spec's axes.
    - `what`: tensor's name in the message.
    - `shape`, `spec`: global shape, and spec with as many dims.
    """
    for dim, (size, axes) in enumerate(zip(shape, spec.dims, strict=True)):
        parts = math.prod(plan.mesh[axis] for axis in axes)
        if size % parts:
            raise UserError(
                f"{what} cannot be split as {spec_text(spec, shape)}: dim {dim} has {size} elements, "
                f"which {' x '.join(axes)} = {parts} does not divide."
            )


def _typed(shape: Sequence[int], dtype: str) -> str:
    """Format a dtype and a shape, as in `float32[8,128]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def in_recipe(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its stacks of layers cut into pipeline stages; `fn` itself if the plan has no stages.

    The stages, microbatches and schedule are those in the options of the plan's source.
    """
    options = plan.source.options if plan.source is not None else {}
    pipeline = read_pipeline(options.get("stages"), options.get("microbatches"), options.get("schedule"))
    if pipeline is None:
        return fn
    with pipelined(pipeline):
        return with_active_pipeline(fn)
