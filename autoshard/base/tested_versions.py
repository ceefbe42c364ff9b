"""Environments in which autoshard is tested, as `docs/versions.md` lists them, and comparisons with them."""

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class VersionSet:
    """Versions of packages that were installed together while the tests passed."""

    name: str
    """Short name of the set in tables."""
    day: str
    """Date of the last run, year first."""
    versions: Mapping[str, str]
    """Version of each package, and of `python`; a package that is not listed was not installed or not used."""
    tests: str
    """Commands that ran the tests."""
    left_out: str
    """Tests that were not run, with the reason; empty if all were."""

    def differs(self, installed: Mapping[str, str | None]) -> list[str]:
        """Return the packages whose installed minor version differs from this set's, or that this set does not have.

        - `installed`: version of each package; None for a package that is missing, which is never a difference.
        """
        return [
            package
            for package, version in installed.items()
            if version is not None and minor_of(version) != minor_of(self.versions.get(package, ""))
        ]


PACKAGES = ("python", "jax", "torch", "torch_xla", "torchax", "transformers")
"""Keys that `VersionSet.versions` may have."""

TESTED = (
    VersionSet(
        "PyTorch/XLA's torch",
        "2026-11-27",
        {
            "python": "3.11.7",
            "jax": "0.10.2",
            "torch": "2.9.1",
            "torch_xla": "2.9.0",
            "torchax": "0.0.13",
            "transformers": "5.24.0",
        },
        "`make test`, `make docs`, `make test-browser`",
        "",
    ),
    VersionSet(
        "today's torch",
        "2026-11-27",
        {"python": "3.11.7", "jax": "0.10.2", "torch": "2.13.0", "torchax": "0.0.13", "transformers": "5.24.0"},
        "`make test-newest`",
        "",
    ),
    VersionSet(
        "today's jax",
        "2026-11-27",
        {"python": "3.12.1", "jax": "0.11.2", "torch": "2.9.1", "torchax": "0.0.13", "transformers": "5.24.0"},
        "`make test`, once by hand, and again where it failed",
        "PyTorch/XLA; Ray; Haliax 0.2.20, which calls what jax 0.11 has "
        "removed; the time of `cached` attention in a compiled TPU schedule, which comes out too short",
    ),
)
"""Environments in which the tests were run."""


def known_versions(package: str) -> str:
    """Return the tested versions of a package, oldest first, joined for a sentence ("1.0, 1.1 and 2.0").

    Empty if no set has the package.
    """
    versions = {each.versions[package] for each in TESTED if package in each.versions}
    ordered = sorted(versions, key=lambda version: [int(number) for number in re.findall(r"\d+", version)])
    return " and ".join(part for part in (", ".join(ordered[:-1]), *ordered[-1:]) if part)


def minor_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (2, 13) for `2.13.0+cpu`, an empty tuple for an empty version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def newer_than_tested(package: str, version: str) -> bool:
    """Return True if a package's minor version is later than every tested one, or if no set has the package."""
    return all(minor_of(version) > minor_of(each.versions.get(package, "")) for each in TESTED)
