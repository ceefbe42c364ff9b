"""Registry of the functions that save, explain, run, show, draw and price plans and programs.

`Plan` has methods that save, explain, run and show it, and `Program` has one that draws it. Neither record imports the
code for that, and the planner does not import the prices of eager torch. A module registers its code with `provides`;
the first use imports that module.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar


Provider = TypeVar("Provider", bound=Callable[..., Any])

HOMES = {
    "eager_price": "autoshard.degrees",
    "explain": "autoshard.planning.explain.explanation",
    "graph": "autoshard.planning.explain.program_graph",
    "run": "autoshard.exec",
    "save": "autoshard.planning.record.plan_files",
    "view": "autoshard.report",
}
"""Request -> the module that registers its provider when it is imported."""


class Runner(Protocol):
    """Runner of one plan on the devices present; `provider("run")(plan)` constructs it.

    Its methods are those of `Plan` of the same names, which documents them in full.
    """

    def jit(self, fn: Any, donate_argnums: int | Sequence[int] | None) -> Callable[..., Any]:
        """Return `fn` as one compiled step under the plan."""
        ...

    def lower(self, fn: Any, args: Sequence[Any], donate_argnums: int | Sequence[int] | None) -> Any:
        """Return the `jax.stages.Lowered` of `fn` for `args` under the plan."""
        ...

    def in_shardings(self) -> tuple[Any, ...]:
        """Return a `NamedSharding` for every argument of the step, in order."""
        ...

    def out_shardings(self) -> tuple[Any, ...]:
        """Return a `NamedSharding` for every result of the step, in order."""
        ...

    def shard_batch(self, batch: Any) -> Any:
        """Return a pytree of host arrays as `jax.Array`s that are split as planned."""
        ...

    def load_batches(self, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
        """Yield `shard_batch` of every batch, sent `ahead` batches in advance."""
        ...

    def load_weights(self, path: str | os.PathLike[str], program: Any) -> dict[str, Any]:
        """Load the parameters of the step from a model's safetensors files, split as planned."""
        ...

    def save_weights(self, params: Mapping[str, Any], folder: str | os.PathLike[str], program: Any) -> Any:
        """Write the parameters into a folder as safetensors files; return their paths."""
        ...

    def torch(self) -> Any:
        """Return the object that applies the plan to torch modules."""
        ...


class Viewer(Protocol):
    """Viewer of one plan in a notebook; `provider("view")(plan)` constructs it.

    Its methods are those of `Plan` of the same names, which documents them in full.
    """

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each argument."""
        ...

    def html(self) -> str:
        """Return a short piece of HTML for a cell: the verdict, the plan in words, and the baselines."""
        ...

    def plot_time(self) -> Any:
        """Plot the parts of the step time, of plan and baselines, as a `matplotlib` figure."""
        ...

    def plot_memory(self) -> Any:
        """Plot the memory of one device at the peak, by kind, as a `matplotlib` figure."""
        ...

    def plot_sharding(self, name: str) -> Any:
        """Plot the devices, coloured by their part of the argument `name`, as a `matplotlib` figure."""
        ...


_providers: dict[str, Callable[..., Any]] = {}
"""Request -> its provider, once the module of the provider is imported."""


def provides(request: str) -> Callable[[Provider], Provider]:
    """Return a decorator that registers a function or class as the provider of `request`, one of `HOMES`.

    Raises `ValueError` for a request that is not in `HOMES`.
    """
    if request not in HOMES:
        raise ValueError(f"a plan is never asked to {request}; it is asked to {', '.join(HOMES)}")

    def named(provider: Provider) -> Provider:
        """Register the provider and return it."""
        _providers[request] = provider
        return provider

    return named


def provider(request: str) -> Callable[..., Any]:
    """Return the provider of `request`, importing its module if needed.

    It is `save_plan`, `explain_plan`, `eager_step_s` or the function that draws a graph, or the class of a `Runner` or
    a `Viewer`.
    Raises `KeyError` for a request that is not in `HOMES`.
    """
    if request not in _providers:
        importlib.import_module(HOMES[request])
    return _providers[request]
