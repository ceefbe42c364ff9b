"""`register_rule`: sharding rules that users give for opaque calls and for functions that become opaque calls."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.base.call_rules import BoundRule, CallRule, bind, parse_call_rule, remember
from autoshard.errors import UserError
from autoshard.mlir import CallWork


def register_rule(
    name: str,
    rule: str | None = None,
    *,
    reduction: str | Sequence[str] = (),
    need_replication: str | Sequence[str] = (),
    permutation: str | Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    flops: str | None = None,
    static_argnums: Sequence[int] = (),
) -> Any:
    """Register the dims of an opaque call that may be split together.

    **For a call by name**, in any program or file: `register_rule("my_kernel", "b h s d -> b h s d")`. The name is a
    custom call's target, or the name of a Pallas kernel. Returns None.

    **For a function**, as a decorator: `@register_rule("b h s d, b h t d, b h t d -> b h s d", ...)`. The function
    becomes one call, which every device runs on its shards. A plan splits the call as planned, and a plain `jax.jit` as
    XLA propagates shardings. On one device the call behaves as if there were no rule. Results over a split `reduction`
    factor are summed over devices. Its arguments are arrays or pytrees of arrays, matched to the rule in flattened
    order. Arguments in `static_argnums` are plain values. The call has no gradient of its own: put `jax.custom_vjp`
    around it and give the backward function a rule too.

    - `rule`: one group of factors for each operand and result (see `autoshard.base.call_rules`); factors name dims.
    - `reduction`: factors that results are summed over.
    - `need_replication`: factors that must stay whole.
    - `permutation`: factors whose split would need an exchange; they stay whole too.
    - `sizes`: sizes of factors that shapes do not determine (in dims of several factors).
    - `flops`: matrix FLOPs of the whole call, such as `"4 b h s t d"`, for the prediction.

    A factor of operands only, or of results only, stays whole unless it is a reduction. `static_argnums` with a call by
    name is an error.

    Raises `UserError` at once for a malformed rule. A rule that does not fit a call raises it when that call is
    planned.
    """
    options: dict[str, Any] = {
        "reduction": reduction,
        "need_replication": need_replication,
        "permutation": permutation,
        "sizes": sizes,
        "flops": flops,
    }
    if rule is None:
        if "->" not in name:
            raise UserError(
                f"register_rule({name!r}) has no rule; give register_rule({name!r}, 'b s d -> b s d') for a call "
                "of that name, or @register_rule('b s d -> b s d') on a function."
            )
        return functools.partial(_decorate, text=name, static_argnums=tuple(static_argnums), options=options)
    if static_argnums:
        raise UserError(f"register_rule({name!r}, ...): static_argnums is for functions, not for calls by name.")
    remember(parse_call_rule(name, rule, **options))
    return None


def _decorate(fn: Callable[..., Any], text: str, static_argnums: tuple[int, ...], options: dict[str, Any]) -> Any:
    """Return `fn` as a `RuledFunction` with the rule `text`; `options` are those of `parse_call_rule`."""
    name = getattr(fn, "__name__", "function")
    return RuledFunction(fn, parse_call_rule(name, text, **options), static_argnums)


class RuledFunction:
    """A function that is one call with a sharding rule, called like the original function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        rule: CallRule,
        static_argnums: tuple[int, ...],
        work: CallWork | None = None,
    ) -> None:
        """Wrap `fn`; `work` is the cost of one call, in which FLOPs that the rule counts take precedence.

        Without `work` the call costs the rule's FLOPs only.
        """
        self.fn, self.rule, self.static_argnums, self.work = fn, rule, static_argnums, work or CallWork()
        functools.update_wrapper(self, fn, updated=())

    @functools.cached_property
    def _partitioned(self) -> Any:
        """The function under JAX's `custom_partitioning`."""
        from jax.experimental.custom_partitioning import custom_partitioning

        call = custom_partitioning(self.fn, static_argnums=self.static_argnums)
        partition = Partition(self.fn, self.rule, self.static_argnums, self.work)
        call.def_partition(partition, sharding_rule=partition.mlir_rule)
        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as one op of the program, with the results of the original function."""
        return self._partitioned(*args, **kwargs)


class Partition:
    """The partitioning callback of `custom_partitioning`: the function on shards, and its operand and result specs."""

    def __init__(self, fn: Callable[..., Any], rule: CallRule, static_argnums: tuple[int, ...], work: CallWork) -> None:
        """Store the arguments, which are those of `RuledFunction`."""
        self.fn, self.rule, self.static_argnums, self.work = fn, rule, static_argnums, work

    def __call__(self, *given: Any) -> tuple[Any, Callable[..., Any], Any, Any]:
        """Return the mesh, the function on shards, and the shardings of results and of operands.

        `given` is `(*static, mesh, operands, results)`, the last two pytrees of shapes with shardings. A factor has the
        axes of the first tensor that splits it, and an axis splits the first such factor only.
        """
        import jax
        from jax.sharding import NamedSharding

        *static, mesh, args, out = given
        operands, in_tree = jax.tree.flatten(args)
        results, out_tree = jax.tree.flatten(out)
        bound = bind(self.rule, [a.shape for a in operands], [r.shape for r in results], f"of `{self.rule.name}`")
        inner = {f for dims in bound.operands for dim in dims for f in dim}
        outer = {f for dims in bound.results for dim in dims for f in dim}
        axes: dict[int, tuple[str, ...]] = {}
        for dims, leaf in zip((*bound.operands, *bound.results), (*operands, *results), strict=True):
            for factor, split in _split_factors(dims, leaf.sharding, mesh):
                tied = factor in inner and (factor in outer) != (bound.kinds[factor] == "reduction")
                if tied and bound.kinds[factor] in ("parallel", "reduction"):
                    axes.setdefault(factor, split)
        used: set[str] = set()
        for factor in sorted(axes):
            axes[factor] = tuple(a for a in axes[factor] if a not in used)
            used.update(axes[factor])
        summed = tuple(a for f in sorted(axes) if bound.kinds[f] == "reduction" for a in axes[f])

        def sharding(dims: Any) -> Any:
            return NamedSharding(mesh, _spec(dims, axes))

        def on_shards(*args: Any) -> Any:
            results_here = self.fn(*_with_static(args, static, self.static_argnums))
            return jax.tree.map(lambda x: jax.lax.psum(x, summed), results_here) if summed else results_here

        in_shardings = in_tree.unflatten([sharding(dims) for dims in bound.operands])
        out_shardings = out_tree.unflatten([sharding(dims) for dims in bound.results])
        return mesh, on_shards, out_shardings, in_shardings

    def mlir_rule(self, *given: Any) -> Any:
        """Return the rule in the notation of `custom_partitioning`, bound to the shapes of one call."""
        *_, operands, results = given
        inner, outer = ([list(t.shape) for t in types] for types in (operands, results))
        return jax_notation(bind(self.rule, inner, outer, f"of `{self.rule.name}`"))


def jax_notation(bound: BoundRule) -> tuple[str, dict[str, Any]]:
    """Return a bound rule in JAX's notation: einsum-like text, and keyword arguments."""

    def tensor(dims: Sequence[Sequence[int]]) -> str:
        texts = [" ".join(f"f{f}" for f in dim) for dim in dims]
        return " ".join(f"({text})" if len(dim) > 1 else text for dim, text in zip(dims, texts, strict=True))

    def of(kind: str) -> tuple[str, ...]:
        return tuple(f"f{i}" for i, each in enumerate(bound.kinds) if each == kind)

    tensors = (*bound.operands, *bound.results)
    alone = {dim[0] for dims in tensors for dim in dims if len(dim) == 1}
    options: dict[str, Any] = {f"f{i}": size for i, size in enumerate(bound.sizes) if i not in alone}
    for kind in ("reduction", "need_replication", "permutation"):
        options[f"{kind}_factors"] = of(kind)
    sides = [", ".join(map(tensor, side)) for side in (bound.operands, bound.results)]
    return " -> ".join(sides), options


def _split_factors(dims: Any, sharding: Any, mesh: Any) -> list[tuple[int, tuple[str, ...]]]:
    """Return (first factor, axes) of every dim that a sharding splits, without axes of one device."""
    spec = getattr(sharding, "spec", None) or ()
    splits = []
    for factors, entry in zip(dims, spec, strict=False):
        axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        axes = tuple(a for a in axes if mesh.shape[a] > 1)
        if factors and axes:
            splits.append((factors[0], axes))
    return splits


def _spec(dims: Any, axes: dict[int, tuple[str, ...]]) -> Any:
    """Return the `PartitionSpec` of a tensor with these factors for each dim; the first factor's `axes` split a dim."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*((axes.get(factors[0]) or None) if factors else None for factors in dims))


def _with_static(args: Sequence[Any], static: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Insert static values into the arguments at their positions."""
    merged = list(args)
    for position, value in sorted(zip(positions, static, strict=True)):
        merged.insert(position, value)
    return merged
