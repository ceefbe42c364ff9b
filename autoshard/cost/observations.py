"""Observations of a step, or of one op shape in it, by a judge; figures are fitted to those in the database."""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from autoshard.cost.step_bill import Bill
from autoshard.cost.topology import Topology


Judge = Literal["compile", "measure"]

STEP = "step"
"""`Observation.op` of a whole step."""

_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt",)}
"""Packages that contain a backend's compiler, in addition to jaxlib."""
_FIELDS = frozenset({"topology", "compiler", "judge", "op", "about", "bill", "seen"})


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """One observation of a step or of one of its ops."""

    topology: str
    """Name of the topology that was observed."""
    compiler: str
    """The compiler of the step, as `compiler_version` writes it."""
    judge: Judge
    """`compile` for the schedule of a compiler, `measure` for times on real devices."""
    op: str
    """`step`, or the kind of one collective."""
    about: Mapping[str, str]
    """Hashes of `program` and `plan`, and a `name` for people."""
    bill: Bill
    """The observed work, ready to be priced: a whole step, or one op of one shape."""
    seen: Mapping[str, Any]
    """JSON of the judge's result. A measured time stands under `seconds`. A schedule has the `hidden_share` of all
    communication, and under `hidden` that of each `traffic_class`, if they are known.
    """

    def to_json(self) -> str:
        """Return canonical JSON: equal observations have equal text."""
        value = {name: getattr(self, name) for name in _FIELDS} | {"bill": self.bill.to_json()}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Observation":
        """Parse the text of `to_json`. Raises: KeyError, TypeError, ValueError or AttributeError for any other text."""
        value = json.loads(text)
        if set(value) != _FIELDS:
            raise ValueError(f"an observation has the keys {sorted(_FIELDS)}")
        return cls(**value | {"bill": Bill.from_json(value["bill"])})

    @property
    def id(self) -> str:
        """SHA-256 of the whole content, in 64 hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def content_hash(observations: Iterable[Observation]) -> str:
    """Return twelve hex digits that depend on the observations, and not on their order; also for no observations."""
    return hashlib.sha256("\n".join(sorted(o.id for o in observations)).encode()).hexdigest()[:12]


def compiler_version(topology: Topology, flags: Sequence[str] = ()) -> str:
    """Return the text that identifies the compiler of a topology, its flags, and the machine if that matters.

    It lists jaxlib and the backend's compiler with their installed versions; `unknown` if neither is installed. Flags,
    sorted, count for TPUs alone.

    Compilers of TPUs and GPUs behave the same on every host. CPU devices are parts of this machine, so its processor is
    named.
    """
    packages = ("jaxlib", *_COMPILERS.get(topology.traits.name, ()))
    parts = [f"{package} {version}" for package in packages if (version := _version(package))]
    if topology.traits.compiles_ahead:
        parts += sorted(set(flags))
    if topology.traits.shares_machine:
        parts.append(f"{topology.host_cores} cores of {_processor()}")
    return ", ".join(parts) or "unknown"


def _version(package: str) -> str:
    """Return a package's version, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    """Return the name of the machine's processor, as `/proc/cpuinfo` or `platform` gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
