"""Recurrent layers as loops over time steps."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program import model_flops


def recurrent_table() -> dict[Any, Callable[..., Any]]:
    """Return lowerings of LSTM, GRU and plain RNNs by torch callable; packing sequences raises `UserError`."""
    import torch

    return {
        torch.lstm: lstm,
        torch.gru: _one_state(Cell(3, _gru, own=True)),
        torch.rnn_tanh: _one_state(Cell(1, _plain("tanh"))),
        torch.rnn_relu: _one_state(Cell(1, _plain("relu"))),
        torch._VF._pack_padded_sequence: _packed,
    }


_States = tuple[Any, ...]
"""States that one step passes to the next, each [B, size]; the hidden state is the first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One time step of a kind of recurrence."""

    gates: int
    """Number of gates: blocks of rows in a weight."""
    step: Callable[[Any, Any, _States], _States]
    """Function from the gates' contributions of inputs and hidden state, both [B, gates, H], and the states."""
    own: bool = False
    """True if the last gate treats both contributions separately, as in a GRU.

    The inputs' contribution then has one part more: the hidden state's bias of the last gate.
    """


def _lstm(given: Any, recurrent: Any, states: _States) -> _States:
    """Return (hidden, cell) after one step of an LSTM; the gates are input, forget, cell and output."""
    import jax
    import jax.numpy as jnp

    gates = given + recurrent
    entry, forget, output = (jax.nn.sigmoid(gates[:, i]) for i in (0, 1, 3))
    cell = forget * states[1] + entry * jnp.tanh(gates[:, 2])
    return output * jnp.tanh(cell), cell


def _gru(given: Any, recurrent: Any, states: _States) -> _States:
    """Return the hidden state, in a tuple, after one step of a GRU; the gates are reset, update and new."""
    import jax
    import jax.numpy as jnp

    reset, update = (jax.nn.sigmoid(given[:, i] + recurrent[:, i]) for i in (0, 1))
    new = jnp.tanh(given[:, 2] + reset * (given[:, 3] + recurrent[:, 2]))
    return ((1 - update) * new + update * states[0],)


def _plain(name: str) -> Callable[[Any, Any, _States], _States]:
    """Return the step of a plain RNN with the activation `tanh` or `relu`, by `name`."""

    def step(given: Any, recurrent: Any, states: _States) -> _States:
        """Return the hidden state, in a tuple, after one step."""
        import jax
        import jax.numpy as jnp

        gates = (given + recurrent)[:, 0]
        return (jnp.tanh(gates) if name == "tanh" else jax.nn.relu(gates),)

    return step


def lstm(x: Any, states: Any, weights: Any, *others: Any) -> tuple[Any, Any, Any]:
    """Lower `torch.lstm` on whole sequences.

    Returns the output and the last hidden and cell states [layers * directions, B, size]. The arguments are as in
    `_layers`.

    Raises `UserError` for packed sequences.
    """
    _check(states)
    out, (hidden, cell) = _layers(Cell(4, _lstm), x, tuple(states), weights, *others)
    return out, hidden, cell


def _one_state(cell: Cell) -> Callable[..., tuple[Any, Any]]:
    """Return the lowering of a recurrence whose only state is the hidden state; it returns output and last states.

    The lowering raises `UserError` for packed sequences.
    """

    def run(x: Any, state: Any, weights: Any, *others: Any) -> tuple[Any, Any]:
        """Return the outputs and the last hidden states."""
        _check(weights)
        out, (hidden,) = _layers(cell, x, (state,), weights, *others)
        return out, hidden

    return run


def _check(given: Any) -> None:
    """Raise `UserError` for a packed sequence, which has a tensor in place of the list `given`."""
    if not isinstance(given, (list, tuple)):
        _packed()


def _packed(*_: Any) -> Any:
    """Raise `UserError`, since packed sequences are not supported."""
    raise UserError(
        "a packed sequence has the lengths of its data in its shape, and a plan is made from shapes alone; give padded "
        "sequences [B, S, ...] and mask what lies after their ends, in the loss or by torch.where."
    )


def _layers(
    cell: Cell,
    x: Any,
    states: _States,
    weights: Sequence[Any],
    *others: Any,
) -> tuple[Any, _States]:
    """Run all layers in all directions, and return the outputs and the last states.

    Outputs [S, B, directions * size], or [B, S, ...] with `batch_first`, are those of the last layer. Last states are
    as `states`. Dropout between layers is off, as everywhere.

    - `x`: inputs [S, B, in], or [B, S, in] with `batch_first`.
    - `states`: first states, each [layers * directions, B, size].
    - `weights`: weights and biases of all layers in torch's order.
    - `others`: `has_biases, num_layers, dropout, train, bidirectional, batch_first`.
    """
    import jax.numpy as jnp

    biases, layers, _, _, both, batch_first = others
    steps_first = jnp.swapaxes(x, 0, 1) if batch_first else x
    ways = 2 if both else 1
    each = len(weights) // (layers * ways)
    last: list[_States] = []
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            number = layer * ways + way
            own = weights[number * each : (number + 1) * each]
            out, after = _sequence(cell, steps_first, tuple(s[number] for s in states), own, biases, way == 1)
            outputs.append(out)
            last.append(after)
        steps_first = jnp.concatenate(outputs, axis=-1) if both else outputs[0]
    ends = tuple(jnp.stack(parts) for parts in zip(*last, strict=True))
    return jnp.swapaxes(steps_first, 0, 1) if batch_first else steps_first, ends


def _sequence(
    cell: Cell, x: Any, states: _States, weights: Sequence[Any], biases: bool, backwards: bool
) -> tuple[Any, _States]:
    """Run one layer in one direction over `x` [S, B, in]; return hidden states [S, B, size] and the last states.

    Inputs of all steps are multiplied by their weights in one matmul; FLOPs of all steps are counted.

    - `weights`: of inputs and of the hidden state, both biases if `biases`, and a projection if an LSTM has one.
    - `backwards`: True to start at the last step; the hidden states stay in the order of the inputs.
    """
    import jax
    import jax.numpy as jnp

    size = weights[0].shape[0] // cell.gates
    entering, recurrent = (w.reshape(cell.gates, size, -1) for w in weights[:2])
    projection = weights[-1] if len(weights) % 2 else None  # an LSTM may project its hidden state
    given = jax.lax.dot_general(x, entering, (((2,), (2,)), ((), ())))
    if biases:
        first, second = (b.reshape(cell.gates, size) for b in weights[2:4])
        given = given + first
        if cell.own:
            own = jnp.broadcast_to(second[-1], (*given.shape[:2], 1, size))
            given = jnp.concatenate([given.at[:, :, :-1].add(second[:-1]), own], axis=2)
        else:
            given = given + second
    elif cell.own:
        given = jnp.concatenate([given, jnp.zeros((*given.shape[:2], 1, size), given.dtype)], axis=2)
    model_flops.record_matmul(given.shape[:2] + (cell.gates, size), entering.shape[-1] + recurrent.shape[-1])
    if projection is not None:
        model_flops.record_matmul((*given.shape[:2], projection.shape[0]), size)
        return _loop(cell, given, states, recurrent, projection, backwards)
    return _recurrence(cell, backwards)(given, states, recurrent)


def _loop(
    cell: Cell, given: Any, states: _States, weight: Any, projection: Any, backwards: bool
) -> tuple[Any, _States]:
    """Scan over the time steps, and return the hidden states of all steps and the last states.

    - `given`: contributions of the inputs to the gates, [S, B, gates, H].
    - `weight`: weights of the hidden state, [gates, H, size].
    - `projection`: weight [size, H] of the hidden state after each step, or None.
    """
    import jax

    def step(before: _States, now: Any) -> tuple[_States, Any]:
        """Return the states after one step, in the dtypes of those before, and the hidden state."""
        gates = jax.lax.dot_general(before[0], weight, (((1,), (2,)), ((), ())))
        hidden, *rest = cell.step(now, gates, before)
        if projection is not None:
            hidden = jax.lax.dot_general(hidden, projection, (((1,), (1,)), ((), ())))
        after = tuple(a.astype(b.dtype) for a, b in zip((hidden, *rest), before, strict=True))
        return after, after[0]

    after, hidden = jax.lax.scan(step, states, given, reverse=backwards)
    return hidden, after


def _recurrence(cell: Cell, backwards: bool) -> Callable[..., tuple[Any, _States]]:
    """Return the loop over time steps, with a custom gradient.

    It is a function of the inputs' gate contributions, the first states and the recurrent weights [gates, H, H]. Its
    backward pass computes the weights' gradient as one matmul over all steps instead of one for each step.
    """
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def run(given: Any, states: _States, weight: Any) -> tuple[Any, _States]:
        """Return the hidden states of all steps and the last states."""
        return _loop(cell, given, states, weight, None, backwards)

    def forward(given: Any, states: _States, weight: Any) -> Any:
        """Return the results, and the values that the backward pass needs."""
        fixed = jax.lax.stop_gradient(weight)
        results, pull = jax.vjp(lambda g, s: _loop(cell, g, s, fixed, None, backwards), given, states)
        return results, (pull, results[0], states[0])

    def backward(kept: Any, gradients: Any) -> Any:
        """Return the gradients of contributions, first states and weights."""
        pull, hidden, first = kept
        of_given, of_states = pull(gradients)
        if backwards:
            before = jnp.concatenate([hidden[1:], first[None]])
        else:
            before = jnp.concatenate([first[None], hidden[:-1]])
        # A gate's gradient is the same for the hidden state as for the inputs; the last gate has a separate part.
        gates = jnp.concatenate([of_given[:, :, :-2], of_given[:, :, -1:]], axis=2) if cell.own else of_given
        of_weight = jax.lax.dot_general(gates, before, (((0, 1), (0, 1)), ((), ())))
        return of_given, of_states, of_weight

    run.defvjp(forward, backward)
    return run


@contextlib.contextmanager
def torchs_own_gru(module: Any) -> Iterator[None]:
    """Restore torch's own `forward` of GRUs while inside, since that is the code with a lowering.

    Importing torch_xla replaces `torch.nn.GRU` by a class whose loop is over its lazy tensors, and which ends the
    process in a trace. Without modules of that class nothing changes.
    """
    from torch.nn.modules import rnn

    theirs = {type(child) for child in module.modules() if type(child).__module__ == "torch_xla.experimental.gru"}
    before = [(each, each.forward) for each in theirs]
    for each in theirs:
        each.forward = rnn.GRU.forward
    try:
        yield
    finally:
        for each, forward in before:
            each.forward = forward
