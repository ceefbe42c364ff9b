"""Registry of the functions that save, explain, run, show and draw plans and programs.

`Plan` has methods that save, explain, run and show it, and `Program` has one that draws it. Neither record imports the
code for that. A module registers its code with `provides`; the first use of a method imports that module.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar


Provider = TypeVar("Provider", bound=Callable[..., Any])

HOMES = {
    "explain": "autoshard.planning.explain.explanation",
    "graph": "autoshard.planning.explain.program_graph",
    "run": "autoshard.exec",
    "save": "autoshard.planning.record.plan_files",
    "view": "autoshard.report",
}
"""Request -> the module that registers its provider when it is imported."""


class Runner(Protocol):
    """Runner of one plan on the devices present; `provider("run")(plan)` constructs it."""

    def jit(self, fn: Any, donate_argnums: int | Sequence[int] | None) -> Callable[..., Any]: ...
    def lower(self, fn: Any, args: Sequence[Any], donate_argnums: int | Sequence[int] | None) -> Any: ...
    def in_shardings(self) -> tuple[Any, ...]: ...
    def out_shardings(self) -> tuple[Any, ...]: ...
    def shard_batch(self, batch: Any) -> Any: ...
    def load_batches(self, batches: Iterable[Any], ahead: int) -> Iterator[Any]: ...
    def load_weights(self, path: str | os.PathLike[str], program: Any) -> dict[str, Any]: ...
    def save_weights(self, params: Mapping[str, Any], folder: str | os.PathLike[str], program: Any) -> Any: ...
    def torch(self) -> Any: ...


class Viewer(Protocol):
    """Viewer of one plan in a notebook; `provider("view")(plan)` constructs it."""

    def to_frame(self) -> Any: ...
    def html(self) -> str: ...
    def plot_time(self) -> Any: ...
    def plot_memory(self) -> Any: ...
    def plot_sharding(self, name: str) -> Any: ...


_providers: dict[str, Callable[..., Any]] = {}


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

    It is `save_plan`, `explain_plan` or the function that draws a graph, or the class of a `Runner` or a `Viewer`.
    """
    if request not in _providers:
        importlib.import_module(HOMES[request])
    return _providers[request]
