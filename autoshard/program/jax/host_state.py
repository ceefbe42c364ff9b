"""Optimizer state in the hosts' memory, fetched one layer at a time, and notes on remat policies that offload."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program.jax.jaxprs import equations
from autoshard.program.jax.update_part import StackUpdate, UpdateSplit, is_var, split_updates
from autoshard.program.lowering import lower_function
from autoshard.program.program_record import Program, Role, serialise


HOSTS = ("none", "optimizer")
"""State that may stay in the hosts' memory between steps; the option that leaves most on the devices is first."""


def on_host(program: Program, what: str) -> Program:
    """Return the same step with `what`, one of `HOSTS`, in the hosts' memory: the optimizer state of stacks of layers.

    With `none` all state is on the devices. The program is returned unchanged if its state is there already. Optimizer
    state of other parameters stays on the devices, and a note counts it. The step is lowered again.

    Raises `UserError` for any other text, for a program without such state, and if no update is elementwise. A step
    whose form on the devices is not known raises it for `none`.
    """
    if what not in HOSTS:
        raise UserError(f"--host `{what}` does not exist; use {' or '.join(f'`{each}`' for each in HOSTS)}.")
    if what == program.on_host:
        return program
    if what == "none":
        if not isinstance(program.fn, Streamed):
            raise UserError(
                f"the step of `{program.name}` updates its state in the hosts' memory; trace it with host `none`."
            )
        return _lowered_again(program, program.fn.fn, what, [n for n in program.notes if not n.startswith(_NOTE)])
    ties = {n: a.result for n, a in enumerate(program.arguments) if a.result is not None}
    state = [n for n in ties if program.arguments[n].role is Role.OPTIMIZER_STATE and program.arguments[n].shape]
    if not state:
        raise UserError(
            f"`{program.name}` updates no optimizer state that could wait in the hosts' memory: give a training step "
            "with an optimizer that has moments (`--train --optimizer adamw`), or leave out `--host optimizer`."
        )
    closed, _ = _traced(program.fn, program.args, program.name)
    hosted = split_updates(closed.jaxpr, ties, state).hosted
    if not hosted:
        raise UserError(
            f"`{program.name}` has no stack of layers with an element-wise update of optimizer state, which the "
            "hosts' memory could store: run its layers by jax.lax.scan over stacked parameters with an optimizer such "
            "as adamw, or leave out `--host optimizer`."
        )
    stays = len(state) - len(hosted)
    one = "1 tensor stays" if stays == 1 else f"{stays} tensors stay"
    more = f"; {one} on the devices, of parameters that no loop over layers takes" if stays else ""
    return _lowered_again(program, Streamed(program.fn, ties, hosted), what, [*program.notes, f"{_NOTE}{more}."])


_NOTE = "Optimizer state of stacks of layers waits in the hosts' memory and is updated a layer at a time"
"""Start of the note on a program with state in the hosts' memory."""


def _lowered_again(program: Program, fn: Callable[..., Any], what: str, notes: Sequence[str]) -> Program:
    """Return the program with the step `fn`, lowered, which has `what` in the hosts' memory, and with these notes."""
    lowered = lower_function(fn, program.args, program.donate_argnums, program.name)
    module, fingerprint = serialise(lowered.ir, program.arguments)
    return dataclasses.replace(
        program,
        fn=fn,
        notes=tuple(notes),
        on_host=what,
        lowerings=lowered.lowerings,
        platform=lowered.platform,
        module=module,
        fingerprint=fingerprint,
    )


class Streamed:
    """A function with its state on the host, built from one with the same arguments that has it on the devices."""

    def __init__(self, fn: Callable[..., Any], ties: Mapping[int, int], held: Collection[int]) -> None:
        """Store flat positions: `ties` maps arguments to the results that replace them, `held` are on the host."""
        self.fn, self.ties, self.held = fn, dict(ties), tuple(sorted(held))
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any) -> Any:
        """Run the step, with the updates of hosted state layer by layer; a function that hosts it already runs as is.

        Raises `UserError` if the function does not update all of that state element by element.
        """
        import jax

        closed, tree = _traced(self.fn, args, self.__name__)
        if all(is_hosted(closed.out_avals[self.ties[number]]) for number in self.held):
            return self.fn(*args)  # its state is on the host already
        split = split_updates(closed.jaxpr, self.ties, self.held)
        if split.hosted != self.held:
            raise UserError(
                f"`{self.__name__}` updates {len(split.hosted)} of the {len(self.held)} tensors that wait in the "
                "hosts' memory layer by layer: it is not the step that was planned; plan it again."
            )
        return tree.unflatten(_run(closed, split, jax.tree.leaves(args)))


def streamed(fn: Callable[..., Any], ties: Mapping[int, int], held: Collection[int]) -> Callable[..., Any]:
    """Return `fn` with the arguments at flat positions `held` on the host; unchanged if it is `Streamed` or if none is.

    `ties` maps the position of an argument to that of the result that replaces it.
    """
    return fn if not held or isinstance(fn, Streamed) else Streamed(fn, ties, held)


def is_hosted(aval: Any) -> bool:
    """Return True if an abstract value is in the hosts' memory; False for one without a memory space, and None."""
    import jax

    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _traced(fn: Callable[..., Any], args: Sequence[Any], name: str) -> tuple[Any, Any]:
    """Return the function's jaxpr, and the tree of its results."""
    import jax

    closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    return closed, jax.tree.structure(out)


def _run(closed: Any, split: UpdateSplit, leaves: Sequence[Any]) -> list[Any]:
    """Return the results of the program: compute all else first, then the updates, grouped by their number of layers.

    The operands of updates are values of `closed`'s arguments, results of earlier equations, or literals.
    """
    import jax.extend.core as jex

    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, leaves, strict=True))
    outputs = {v for update in split.updates for v in update.outputs}
    wanted = [v for v in split.returned if is_var(v) and v not in outputs]
    for update in split.updates:
        inner = {eqn.outvars[0] for eqn in update.equations}
        wanted += [v for eqn in update.equations for v in eqn.invars if is_var(v) and v not in inner]
    wanted = list(dict.fromkeys(wanted))
    first = jaxpr.replace(eqns=list(split.before), outvars=wanted, debug_info=jaxpr.debug_info.with_unknown_names())
    env |= zip(wanted, jex.jaxpr_as_fun(jex.ClosedJaxpr(first, closed.consts))(*leaves), strict=True)
    together: dict[int, list[StackUpdate]] = defaultdict(list)
    for update in split.updates:
        together[update.layers].append(update)
    for updates in together.values():
        _by_layer(updates, env)
    return [env[v] if is_var(v) else v.val for v in split.returned]


def _by_layer(updates: Sequence[StackUpdate], env: dict[Any, Any]) -> None:
    """Run updates with equal numbers of layers, layer by layer, and add their outputs to `env`.

    Each output is written over the argument that it replaces, so that no second stack is allocated.
    """
    import jax
    import jax.numpy as jnp
    from jax.lax import dynamic_index_in_dim, dynamic_update_index_in_dim

    space = jax.memory.Space
    begin = {}
    for update in updates:
        for out in update.outputs:
            old = update.replaces.get(out)
            stack = jnp.zeros(out.aval.shape, out.aval.dtype) if old is None else env[old]
            begin[out] = jax.device_put(stack, space.Host) if old in update.hosted else stack

    def layer(number: Any, stacks: dict[Any, Any]) -> dict[Any, Any]:
        stacks = dict(stacks)
        for update in updates:
            carried = {old: out for out, old in update.replaces.items()}
            values = {}
            for value in update.inputs:
                stack_of_value = stacks[carried[value]] if value in carried else env[value]
                part = dynamic_index_in_dim(stack_of_value, number, keepdims=False, allow_negative_indices=False)
                values[value] = jax.device_put(part, space.Device) if value in update.hosted else part
            for eqn in update.equations:
                values[eqn.outvars[0]] = _one_layer(eqn, values, env)
            for out in update.outputs:
                part = values[out]
                if update.replaces.get(out) in update.hosted:
                    part = jax.device_put(part, space.Host)
                stacks[out] = dynamic_update_index_in_dim(stacks[out], part, number, 0, allow_negative_indices=False)
        return stacks

    names = list(begin)
    done = jax.lax.fori_loop(
        0,
        updates[0].layers,
        lambda number, stacks: tuple(layer(number, dict(zip(names, stacks, strict=True))).values()),
        tuple(begin.values()),
    )
    env |= zip(names, done, strict=True)


def _one_layer(eqn: Any, values: Mapping[Any, Any], env: Mapping[Any, Any]) -> Any:
    """Return the result of an elementwise equation for one layer."""
    import jax.numpy as jnp

    given = [(values[v] if v in values else env[v]) if is_var(v) else v.val for v in eqn.invars]
    if eqn.primitive.name == "broadcast_in_dim":
        return jnp.broadcast_to(given[0], eqn.outvars[0].aval.shape[1:])
    with eqn.ctx.manager:
        return eqn.primitive.bind(*given, **eqn.params)


def offload_notes(jaxpr: Any) -> tuple[str, ...]:
    """Return one note that names all values that a policy offloads although the backward pass does not read them.

    The result is empty without such values.

    JAX saves nothing for a name that the backward pass does not use. The carry of a scan is such a value if it is named
    at the end of the layer. The scan saves the input of the next layer instead, under no name.
    """
    all_equations = list(equations(jaxpr))
    policies = {e.params["policy"] for e in all_equations if e.params.get("differentiated") and e.params.get("policy")}
    if not policies:
        return ()
    named = [e for e in all_equations if e.primitive.name == "name"]
    offloaded = [e for e in named if any(_is_offloaded(policy, e) for policy in policies)]
    hosted = {
        var for e in all_equations if all(map(is_hosted, _avals(e))) for var in e.invars if not hasattr(var, "val")
    }
    sent = {e.params["name"] for e in offloaded if not hosted.isdisjoint(e.outvars)}
    idle = sorted({e.params["name"] for e in offloaded} - sent)
    if not idle:
        return ()
    quoted = ", ".join(f"`{name}`" for name in idle)
    return (
        f"A remat policy offloads {quoted}, which has no effect: the backward pass does not read a value of that name. "
        "To offload the carry of a jax.lax.scan, name it where the layer begins instead of where it ends.",
    )


def _is_offloaded(policy: Any, equation: Any) -> bool:
    """Return True if the policy offloads the value that an equation of `checkpoint_name` names."""
    answer = policy(equation.primitive, *(var.aval for var in equation.invars), **equation.params)
    return type(answer).__name__ == "Offloadable"


def _avals(equation: Any) -> list[Any]:
    """Return the abstract results of a `device_put`; `[None]` for any other equation."""
    return [var.aval for var in equation.outvars] if equation.primitive.name == "device_put" else [None]
