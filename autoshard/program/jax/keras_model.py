"""A Keras 3 model on the JAX backend becomes the program of its own training or prediction step."""

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from autoshard.errors import UserError
from autoshard.program import argument_names, example_values
from autoshard.program.jax.trace import trace
from autoshard.program.lowering import user_code
from autoshard.program.program_record import Program, Role


@dataclasses.dataclass(frozen=True, slots=True)
class KerasStep:
    """The step of a Keras model as a function of trees of arrays.

    `fn(parameters, others, optimizer, metrics, batch)` returns the first four updated and the logs of the step; without
    training `fn(parameters, others, batch)` returns the outputs.
    """

    fn: Callable[..., Any]
    variables: tuple[dict[str, Any], ...]
    """For each argument but the batch: Keras's variables in its own order, which the arguments keep, by name."""
    training: bool
    name: str

    def state(self, values: Callable[[Any], Any]) -> tuple[dict[str, Any], ...]:
        """The arguments but the batch, with `values(variable)` in the place of each variable."""
        return tuple(
            OrderedDict((name, values(variable)) for name, variable in group.items()) for group in self.variables
        )

    def state_of(self, other: "KerasStep") -> tuple[dict[str, Any], ...]:
        """The values of the same model's variables, made another time, under the names that they have here."""
        return tuple(
            OrderedDict((name, there.value) for name, there in zip(group, others.values(), strict=True))
            for group, others in zip(self.variables, other.variables, strict=True)
        )


def from_keras(
    make: Any,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    train: bool | None = None,
    name: str | None = None,
) -> Program:
    """The step that `Model.fit` runs, of a Keras 3 model on the JAX backend, as a program.

    `make` is a function that returns the model, or the model itself; a function is called where nothing is computed or
    allocated, and so for models of any size. `x`, `y` and `sample_weight` are trees of arrays or of anything else with
    a shape and a dtype, for one whole batch. A compiled model is planned for training with its optimizer, losses and
    metrics, another, or any with `train=False`, for prediction. Arguments have the paths of Keras's variables
    (`dense/kernel`); the optimizer's start with `optimizer`. Raises `UserError` if Keras computes with another backend,
    if nothing is compiled and `train` is asked for, or if the step cannot be traced.
    """
    keras = _keras()
    batch = keras_batch(x, y, sample_weight)
    with _own_names():
        # What a model that is there already lacks is made for real: it stays in the model.
        made = (lambda build: build()) if isinstance(make, keras.Model) else _abstract
        step = user_code(_label(make), lambda: made(lambda: keras_step(_model(keras, make), batch, train)))
        shapes = step.state(_shape_of)
        program = trace(
            step.fn,
            (*shapes, batch),
            name=name or f"{step.name} {'training' if step.training else 'inference'}",
            arg_names=("", "", "optimizer", "metrics", "") if step.training else ("", "", ""),
            evidence=[role for group in _roles(shapes, batch) for role in group],
        )
    return dataclasses.replace(program, make_args=_with_values(make, step, batch, program))


def _with_values(make: Any, step: KerasStep, batch: Any, program: Program) -> Callable[[int], tuple[Any, ...]]:
    """`make_args`: the values that Keras gives the variables, and plausible data."""
    given = [argument for argument in program.arguments if argument.role is Role.BATCH]
    limit = example_values.smallest_table([each.shape for each in program.arguments if each.role is Role.PARAMETER])
    data = example_values.fill((batch,), [each.name for each in given], [Role.BATCH] * len(given), lambda _: limit)

    def make_args(seed: int) -> tuple[Any, ...]:
        keras = _keras()
        keras.utils.set_random_seed(seed)
        real = keras_step(_model(keras, make), batch, step.training)
        return (*step.state_of(real), *data(seed))

    return make_args


def keras_step(model: Any, batch: Mapping[str, Any], train: bool | None) -> KerasStep:
    """The step of a model, whose variables are made if they are not there, for batches of these shapes.

    Raises `UserError` where `train` is asked for of a model that is not compiled.
    """
    data = (batch["x"], batch.get("y"), batch.get("sample_weight"))
    training = bool(model.compiled) if train is None else train
    if training and not model.compiled:
        raise UserError(f"the Keras model `{model.name}` is to be trained, but it is not compiled: call its `compile`.")
    if training:
        model._symbolic_build(data_batch=data)  # what `fit` calls: variables of layers, metrics and optimizer
    elif not all(layer.built for layer in model._flatten_layers()):
        sys.modules["keras"].backend.compute_output_spec(model, _symbolic(data[0]), training=False)
    parameters = _by_name((variable.path, variable) for variable in model.trainable_variables)
    others = _by_name(((variable.path, variable) for variable in model.non_trainable_variables), taken=set(parameters))
    groups: tuple[dict[str, Any], ...] = (parameters, others)
    if training:
        slots = _by_name((_slot(variable, parameters), variable) for variable in model.optimizer.variables)
        groups += (slots, _by_name((variable.path, variable) for variable in model.metrics_variables))

    def fit_step(*args: Any) -> Any:
        *state, given = args
        data = (given["x"], given.get("y"), given.get("sample_weight"))
        logs, after = model.train_step(tuple(list(values.values()) for values in state), data)
        return (*(OrderedDict(zip(group, new, strict=True)) for group, new in zip(groups, after, strict=True)), logs)

    def predict_step(*args: Any) -> Any:
        *state, given = args
        return model.predict_step(tuple(list(values.values()) for values in state), (given["x"],))[0]

    return KerasStep(fit_step if training else predict_step, groups, training, model.name)


def _keras() -> Any:
    """Keras, which must compute with JAX."""
    try:
        import keras
    except ImportError:
        raise UserError("from_keras: the package `keras` is not installed.") from None
    if (backend := keras.backend.backend()) != "jax":
        raise UserError(
            f"from_keras: Keras computes with {backend}, and only its JAX backend can be planned: set "
            'os.environ["KERAS_BACKEND"] = "jax" before Keras is imported.'
        )
    return keras


def _model(keras: Any, make: Any) -> Any:
    model = make if isinstance(make, keras.Model) else make() if callable(make) else make
    if not isinstance(model, keras.Model):
        raise UserError(f"from_keras: a keras.Model or a function that returns one is needed, not {_kind(model)}.")
    return model


def _label(make: Any) -> str:
    return getattr(make, "name", None) or getattr(make, "__name__", type(make).__name__)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


@contextmanager
def _own_names() -> Iterator[None]:
    """Automatic names of layers start anew inside, and go on from where they were after it.

    Keras counts the layers of a process: the same model made again to be trained would have other names.
    """
    from keras.src.backend.common import global_state

    kept = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", kept)


def _abstract(make: Callable[[], KerasStep]) -> KerasStep:
    """What `make` makes, computing nothing: its variables have shapes and no values."""
    import jax

    made: list[KerasStep] = []
    jax.eval_shape(lambda: made.append(make()))
    return made[0]


def _shape_of(variable: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)


def keras_batch(x: Any, y: Any, sample_weight: Any) -> dict[str, Any]:
    """The shapes of a batch as the step takes it; `UserError` for leaves that are no arrays."""
    import jax

    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    for key, part in parts.items():
        for leaf in jax.tree.leaves(part):
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise UserError(f"from_keras: `{key}` needs arrays or their shapes, not {_kind(leaf)}.")
    return {
        key: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype), part)
        for key, part in parts.items()
        if part is not None
    }


def _symbolic(tree: Any) -> Any:
    import jax
    import keras

    return jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, str(leaf.dtype)), tree)


def _slot(variable: Any, parameters: Mapping[str, Any]) -> str:
    """`momentum.dense/kernel` for what Keras calls `adam/dense_kernel_momentum`."""
    own = variable.path.rpartition("/")[2]
    fitting = [name for name in parameters if own.startswith(f"{name.replace('/', '_')}_")]
    if not fitting:
        return own
    parameter = max(fitting, key=len)
    return f"{own[len(parameter) + 1 :]}.{parameter}"


def _by_name(pairs: Any, taken: set[str] | None = None) -> dict[str, Any]:
    """Variables by name, each of which is used once."""
    pairs = list(pairs)
    names = argument_names.unique([name for name, _ in pairs], set() if taken is None else taken)
    return {name: variable for name, (_, variable) in zip(names, pairs, strict=True)}


def _roles(shapes: Sequence[Mapping[str, Any]], batch: Any) -> Iterator[list[Role]]:
    import jax

    kinds = (Role.PARAMETER, Role.OTHER, Role.OPTIMIZER_STATE, Role.OTHER)
    for group, role in zip(shapes, kinds, strict=False):  # prediction has neither optimizer nor metrics
        yield [role] * len(group)
    yield [Role.BATCH] * len(jax.tree.leaves(batch))
