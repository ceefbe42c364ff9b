"""What can be done with programs and plans, and who does it: the one way from a record to code that is written in terms
of it.

`Plan` has methods that save, explain, run and show it, and `Program` one that draws it, though neither knows the code
that does so. A module that provides one of these says so with `provides`; a record that is asked first loads it.
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
"""What a plan can be asked for -> the module that provides it once it is imported."""


class Runner(Protocol):
    """Runs one plan on the devices present; `provider("run")(plan)` makes it."""

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
    """Shows one plan in a notebook; `provider("view")(plan)` makes it."""

    def to_frame(self) -> Any: ...
    def html(self) -> str: ...
    def plot_time(self) -> Any: ...
    def plot_memory(self) -> Any: ...
    def plot_sharding(self, name: str) -> Any: ...


_providers: dict[str, Callable[..., Any]] = {}


def provides(request: str) -> Callable[[Provider], Provider]:
    """A decorator that names what it decorates as the provider of `request`, one of `HOMES`.

    Raises `ValueError` for a request that plans do not make.
    """
    if request not in HOMES:
        raise ValueError(f"a plan is never asked to {request}; it is asked to {', '.join(HOMES)}")

    def named(provider: Provider) -> Provider:
        _providers[request] = provider
        return provider

    return named


def provider(request: str) -> Callable[..., Any]:
    """What provides `request`: `save_plan` and `explain_plan`, or the class that runs or shows the plan it is given."""
    if request not in _providers:
        importlib.import_module(HOMES[request])
    return _providers[request]
