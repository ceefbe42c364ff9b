"""Keras's own training loop with each step run as planned."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from autoshard.errors import UserError
from autoshard.exec.apply.jax_application import Application
from autoshard.planning import Plan
from autoshard.program import KerasStep, keras_batch, keras_step


def fit_as_planned(plan: Plan, model: Any) -> None:
    """Make `model.fit` run each step under the plan, with its pins and with the optimizer state sharded as planned.

    - `model`: compiled Keras model, constructed like the one of the plan's program; its `train_function` is replaced.

    Data, callbacks, validation and checkpoints remain Keras's. A batch of another shape, such as the last of an epoch,
    runs with XLA's propagation instead of the plan. A later `compile` removes the plan.

    Raises `UserError` if the model is not compiled, and for a plan with a program for each stage. The first step raises
    it if variables or the batch have other shapes than planned.
    """
    if not getattr(model, "compiled", False):
        raise UserError(f"fit_as_planned: the Keras model `{model.name}` is not compiled: call its `compile` first.")
    plan.check_one_step()
    model.train_function = _PlannedSteps(plan, model)


class _PlannedSteps:
    """Train function that Keras calls for each step: `(state, iterator) -> (logs, state)`."""

    def __init__(self, plan: Plan, model: Any) -> None:
        self.plan = plan
        self.model = model
        self.names: list[list[str]] = []
        """Names of the variables in each list of the state; empty before the first step."""
        self.shapes = _planned(plan)
        """Planned shapes of the batch's arrays, in order."""
        self.planned: Any = None
        """Step under the plan; None before the first step."""
        self.other: Any = None
        """Same step by `jax.jit`, for batches of other shapes; None before the first step."""

    def __call__(self, state: tuple[list[Any], ...], iterator: Iterator[Any]) -> tuple[Any, tuple[list[Any], ...]]:
        """Run one step on the iterator's next batch; return its logs and the new state, in Keras's lists.

        - `state`: Keras's lists of variables: trainable, others, the optimizer's and the metrics'; their buffers are
          donated.

        A batch of the planned shapes runs under the plan, another one without it. The first step checks shapes
        (`_check`).
        """
        import keras

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(next(iterator))
        batch = {"x": x, "y": y, "sample_weight": sample_weight}
        batch = {key: part for key, part in batch.items() if part is not None}
        if not self.names:
            self._begin(keras_step(self.model, keras_batch(x, y, sample_weight), True), state, batch)
        groups = [OrderedDict(zip(names, values, strict=True)) for names, values in zip(self.names, state, strict=True)]
        run = self.planned if _shapes(batch) == self.shapes else self.other
        *after, logs = run(*groups, batch)
        return logs, tuple(list(group.values()) for group in after)

    def _begin(self, step: KerasStep, state: tuple[list[Any], ...], given: Any) -> None:
        """Check the first step against the plan, and prepare the planned step and one for batches of other shapes.

        Both donate the whole state. `given` is the batch: a dict of the present ones of `x`, `y` and `sample_weight`.
        """
        import jax

        _check(self.plan, step, state, given)
        self.names = [list(group) for group in step.variables]
        donated = tuple(range(len(state)))
        self.planned = Application(self.plan).jit(step.fn, donate_argnums=donated)
        self.other = jax.jit(step.fn, donate_argnums=donated)


def _planned(plan: Plan) -> list[tuple[int, ...]]:
    """Return the planned shapes of the batch's arrays, in the order of the plan's arguments."""
    return [tuple(plan.shapes[name]) for name in plan.arguments if plan.roles[name] == "batch"]


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    """Return the shapes of a pytree's arrays, in JAX's order of leaves."""
    import jax

    return [tuple(leaf.shape) for leaf in jax.tree.leaves(tree)]


def _check(plan: Plan, step: KerasStep, state: tuple[list[Any], ...], given: Any) -> None:
    """Raise `UserError` if the variables of `state` or the arrays of the batch `given` differ in number, order or shape
    from the plan's.
    """
    sizes = [tuple(value.shape) for group in state for value in group]
    wanted = [tuple(plan.shapes[name]) for name in plan.arguments if plan.roles[name] != "batch"]
    if sizes != wanted:
        raise UserError(
            f"fit_as_planned: the Keras model `{step.name}` has {len(sizes)} variables with its optimizer and metrics, "
            f"and the plan ({plan.program_name}) {len(wanted)}, or some have other shapes: plan this model."
        )
    shapes, planned = _shapes(given), _planned(plan)
    if shapes != planned:
        raise UserError(
            f"fit_as_planned: the first batch has arrays of shapes {', '.join(str(list(s)) for s in shapes)}; the plan "
            f"is for {', '.join(str(list(s)) for s in planned)}: give `fit` that `batch_size`."
        )
