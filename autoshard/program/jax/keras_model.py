"""Programs of Keras 3 models on the JAX backend: the model's own training or prediction step."""

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

    `fn(parameters, others, optimizer, metrics, batch)` returns the first four updated and the logs of the step. Without
    training, `fn(parameters, others, batch)` returns the outputs.
    """

    fn: Callable[..., Any]
    variables: tuple[dict[str, Any], ...]
    """Variables by name for each argument except the batch, in Keras's own order, which the arguments preserve."""
    training: bool
    """True for the step of `fit`, False for that of `predict`."""
    name: str
    """Name of the Keras model."""

    def state(self, values: Callable[[Any], Any]) -> tuple[dict[str, Any], ...]:
        """Return the arguments except the batch, with `values(variable)` in place of each variable."""
        return tuple(
            OrderedDict((name, values(variable)) for name, variable in group.items()) for group in self.variables
        )

    def state_of(self, other: "KerasStep") -> tuple[dict[str, Any], ...]:
        """Return the values of another build of the same model, under the names of this one."""
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
    """Return the step that `Model.fit` runs for a Keras 3 model on the JAX backend, as a program.

    Arguments have the paths of Keras's variables (`dense/kernel`); the optimizer's start with `optimizer`. Its
    `make_args` builds the model again, with initial values for a seed.

    - `make`: the model, or a function that returns it. The function is called where nothing is computed or allocated,
      so the model may have any size.
    - `x`, `y`, `sample_weight`: trees of one whole batch, of arrays or anything else with a shape and a dtype.
    - `train`: False for prediction. By default a compiled model is planned for training with its optimizer, losses and
      metrics, and any other for prediction.
    - `name`: name of the program; None for the model's name with `training` or `inference`.

    Raises `UserError` if Keras uses another backend, or if the step cannot be traced. `train` for a model that is not
    compiled raises it too.
    """
    keras = _keras()
    batch = keras_batch(x, y, sample_weight)
    with _own_names():
        # Missing variables of an existing model get real values, since they stay in the model.
        build_by = (lambda build: build()) if isinstance(make, keras.Model) else _abstract
        step = user_code(_label(make), lambda: build_by(lambda: keras_step(_model(keras, make), batch, train)))
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
    """Return `make_args`, which gives variables Keras's own initial values and the batch plausible data."""
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
    """Return the step of a model for batches of these shapes, and create any missing variables of the model.

    With `train` None it is the training step if the model is compiled. Prediction reads `x` of the batch alone.

    Raises `UserError` if `train` is set for a model that is not compiled.
    """
    data = (batch["x"], batch.get("y"), batch.get("sample_weight"))
    training = bool(model.compiled) if train is None else train
    if training and not model.compiled:
        raise UserError(f"the Keras model `{model.name}` is to be trained, but it is not compiled: call its `compile`.")
    if training:
        model._symbolic_build(data_batch=data)  # as `fit` does: creates the variables of layers, metrics and optimizer
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
    """Import and return Keras. Raises `UserError` if it is not installed, or if its backend is not JAX."""
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
    """Return the model, or that which the function `make` returns. Raises `UserError` for anything else."""
    model = make if isinstance(make, keras.Model) else make() if callable(make) else make
    if not isinstance(model, keras.Model):
        raise UserError(f"from_keras: a keras.Model or a function that returns one is needed, not {_kind(model)}.")
    return model


def _label(make: Any) -> str:
    """Return the name of a model or function in errors."""
    return getattr(make, "name", None) or getattr(make, "__name__", type(make).__name__)


def _kind(value: Any) -> str:
    """Return a value's type in words, such as `a list`."""
    return f"a {type(value).__name__}"


@contextmanager
def _own_names() -> Iterator[None]:
    """Restart the automatic names of layers while inside, and resume the previous count afterwards.

    Keras counts the layers of a process, so a second build of the same model would have other names.
    """
    from keras.src.backend.common import global_state

    counts = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", counts)


def _abstract(make: Callable[[], KerasStep]) -> KerasStep:
    """Return the result of `make` without computing anything: its variables have shapes and no values."""
    import jax

    steps: list[KerasStep] = []
    jax.eval_shape(lambda: steps.append(make()))
    return steps[0]


def _shape_of(variable: Any) -> Any:
    """Return shape and dtype of a variable as a `jax.ShapeDtypeStruct`."""
    import jax

    return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)


def keras_batch(x: Any, y: Any, sample_weight: Any) -> dict[str, Any]:
    """Return the shapes of a batch as the step takes it; parts that are None are left out.

    Raises `UserError` for leaves without shape and dtype.
    """
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
    """Return a tree of shapes as `keras.KerasTensor`s."""
    import jax
    import keras

    return jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, str(leaf.dtype)), tree)


def _slot(variable: Any, parameters: Mapping[str, Any]) -> str:
    """Return `momentum.dense/kernel` for a variable that Keras calls `adam/dense_kernel_momentum`.

    The longest name in `parameters` that fits counts; if none does, the result is the last part of the path.
    """
    own = variable.path.rpartition("/")[2]
    fitting = [name for name in parameters if own.startswith(f"{name.replace('/', '_')}_")]
    if not fitting:
        return own
    parameter = max(fitting, key=len)
    return f"{own[len(parameter) + 1 :]}.{parameter}"


def _by_name(pairs: Any, taken: set[str] | None = None) -> dict[str, Any]:
    """Return variables by unique name, from pairs of name and variable in order; names in `taken` are not used."""
    pairs = list(pairs)
    names = argument_names.unique([name for name, _ in pairs], set() if taken is None else taken)
    return {name: variable for name, (_, variable) in zip(names, pairs, strict=True)}


def _roles(shapes: Sequence[Mapping[str, Any]], batch: Any) -> Iterator[list[Role]]:
    """Yield the roles of the leaves of each argument: parameters, others, optimizer state, metrics, and the batch."""
    import jax

    kinds = (Role.PARAMETER, Role.OTHER, Role.OPTIMIZER_STATE, Role.OTHER)
    for group, role in zip(shapes, kinds, strict=False):  # prediction has neither optimizer nor metrics
        yield [role] * len(group)
    yield [Role.BATCH] * len(jax.tree.leaves(batch))
