"""The figures that plans are priced with: shipped, learned from what was seen here, the user's own."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.cost._calibration import Calibration, load_calibration, own_figures
from autoshard.cost._database import Database
from autoshard.cost._fit import Fit, fit
from autoshard.cost._flags import with_flags
from autoshard.cost._observations import Observation, compiler_version, content_hash
from autoshard.cost._topology import Topology


_fits: dict[tuple[object, ...], Fit] = {}


def learned_fit(topology: Topology, flags: Sequence[str] = ()) -> Fit:
    """The figures of a topology with what the user's database has seen of it and of this compiler.

    Of steps that were compiled with these `flags`, if there are such, and else of those without any. Without
    observations they are those of `load_calibration`, and nothing is created. Raises what that raises.
    """
    database = Database.of_user()
    if database is None:
        return fit_observations(topology, [])
    if flags:
        found = database.read(topology.name, compiler_version(topology, flags))
        if found:
            return fit_observations(topology, found, flags)
    return fit_observations(topology, database.read(topology.name, compiler_version(topology)))


def fit_observations(topology: Topology, observations: Sequence[Observation], flags: Sequence[str] = ()) -> Fit:
    """The same with these observations, all of the topology, of one compiler version and of steps with these `flags`.

    What the user's own calibration file says is not fitted. Raises what `load_calibration` and `with_flags` raise.
    """
    base = with_flags(load_calibration(topology.chip), flags).calibration
    fixed = own_figures(topology.chip)
    key = (base, topology.backend, fixed, content_hash(observations), tuple(flags))
    if key not in _fits:
        _fits[key] = dataclasses.replace(fit(base, topology.backend, observations, fixed), flags=tuple(flags))
    return _fits[key]


def said_of_fit(found: Fit) -> dict[str, Any]:
    """What a plan keeps of the figures that it was priced with, so that it can be priced again without the database."""
    return {
        "hash": found.hash,
        "observations": found.observations,
        "figures": {each.figure: each.value for each in found.figures},
    }


def said_calibration(
    chip: str, learned: Mapping[str, Any] | None, flags: Mapping[str, Any] | None = None
) -> Calibration:
    """The calibration of a plan that keeps what was learned, and what compiler flags changed; None where nothing is."""
    base = load_calibration(chip)
    for said in (learned, flags):
        base = dataclasses.replace(base, **said["figures"]) if said else base
    return base
