"""Keras's own training loop, with each step as planned."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from autoshard.errors import UserError
from autoshard.exec.apply.jax_application import Application
from autoshard.planning import Plan
from autoshard.program import KerasStep, keras_batch, keras_step


def fit_as_planned(plan: Plan, model: Any) -> None:
    """Have `model.fit` run each step as the plan says, with its pins and the optimizer state split as planned.

    `model` is the compiled Keras model that the plan's program was made of, made once more. Data, callbacks, validation
    and checkpoints stay Keras's; a batch of another shape than was planned, such as the last one of an epoch, runs as
    XLA's propagation makes it. A `compile` afterwards takes the plan away. Raises `UserError` if the model is not
    compiled, and in the first step if its variables or the batch have other shapes than were planned.
    """
    if not getattr(model, "compiled", False):
        raise UserError(f"fit_as_planned: the Keras model `{model.name}` is not compiled: call its `compile` first.")
    plan.check_one_step()
    model.train_function = _PlannedSteps(plan, model)


class _PlannedSteps:
    """What Keras calls for each step: `(state, iterator) -> (logs, state)`."""

    def __init__(self, plan: Plan, model: Any) -> None:
        self.plan = plan
        self.model = model
        self.names: list[list[str]] = []
        """Once the first step has come: names of the variables in each list of the state."""
        self.shapes = _planned(plan)
        self.planned: Any = None
        self.other: Any = None

    def __call__(self, state: tuple[list[Any], ...], iterator: Iterator[Any]) -> tuple[Any, tuple[list[Any], ...]]:
        import keras

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(next(iterator))
        given = {"x": x, "y": y, "sample_weight": sample_weight}
        given = {key: part for key, part in given.items() if part is not None}
        if not self.names:
            self._begin(keras_step(self.model, keras_batch(x, y, sample_weight), True), state, given)
        groups = [OrderedDict(zip(names, values, strict=True)) for names, values in zip(self.names, state, strict=True)]
        run = self.planned if _shapes(given) == self.shapes else self.other
        *after, logs = run(*groups, given)
        return logs, tuple(list(group.values()) for group in after)

    def _begin(self, step: KerasStep, state: tuple[list[Any], ...], given: Any) -> None:
        import jax

        _check(self.plan, step, state, given)
        self.names = [list(group) for group in step.variables]
        donated = tuple(range(len(state)))
        self.planned = Application(self.plan).jit(step.fn, donate_argnums=donated)
        self.other = jax.jit(step.fn, donate_argnums=donated)


def _planned(plan: Plan) -> list[tuple[int, ...]]:
    return [tuple(plan.shapes[name]) for name in plan.arguments if plan.roles[name] == "batch"]


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    import jax

    return [tuple(leaf.shape) for leaf in jax.tree.leaves(tree)]


def _check(plan: Plan, step: KerasStep, state: tuple[list[Any], ...], given: Any) -> None:
    found = [tuple(value.shape) for group in state for value in group]
    wanted = [tuple(plan.shapes[name]) for name in plan.arguments if plan.roles[name] != "batch"]
    if found != wanted:
        raise UserError(
            f"fit_as_planned: the Keras model `{step.name}` has {len(found)} variables with its optimizer and metrics, "
            f"and the plan ({plan.program_name}) {len(wanted)}, or some have other shapes: plan this model."
        )
    shapes, planned = _shapes(given), _planned(plan)
    if shapes != planned:
        raise UserError(
            f"fit_as_planned: the first batch has arrays of shapes {', '.join(str(list(s)) for s in shapes)}; the plan "
            f"is for {', '.join(str(list(s)) for s in planned)}: give `fit` that `batch_size`."
        )
