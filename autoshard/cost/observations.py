"""What a judge saw of a step, or of one op shape in it: what the database keeps and figures are fitted to."""

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
"""The package beside jaxlib that has a backend's compiler."""
_FIELDS = frozenset({"topology", "compiler", "judge", "op", "about", "bill", "seen"})


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """Something that was seen once."""

    topology: str
    compiler: str
    """The compiler that was seen, as `compiler_version` writes it."""
    judge: Judge
    op: str
    """`step`, or the kind of one collective."""
    about: Mapping[str, str]
    """`program` and `plan` (hashes), and `name`, for people."""
    bill: Bill
    """The work that was seen, ready to be priced: a whole step, or one op of one shape."""
    seen: Mapping[str, Any]
    """JSON of what the judge says; if that is a time, it stands under `seconds`."""

    def to_json(self) -> str:
        """Canonical: equal observations have equal text."""
        value = {name: getattr(self, name) for name in _FIELDS} | {"bill": self.bill.to_json()}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Observation":
        """What `to_json` gave. Raises: KeyError, TypeError or ValueError for anything else."""
        value = json.loads(text)
        if set(value) != _FIELDS:
            raise ValueError(f"an observation has the keys {sorted(_FIELDS)}")
        return cls(**value | {"bill": Bill.from_json(value["bill"])})

    @property
    def id(self) -> str:
        """Hash of all that it says."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def content_hash(observations: Iterable[Observation]) -> str:
    """Twelve hex digits that change with what was seen, not with the order or the time in which it was kept."""
    return hashlib.sha256("\n".join(sorted(o.id for o in observations)).encode()).hexdigest()[:12]


def compiler_version(topology: Topology, flags: Sequence[str] = ()) -> str:
    """What makes programs for a topology, with which flags, and what it stands on: compilers of TPUs and of GPUs are
    the same everywhere, CPU devices are parts of this machine."""
    packages = ("jaxlib", *_COMPILERS.get(topology.traits.name, ()))
    made = [f"{package} {found}" for package in packages if (found := _version(package))]
    if topology.traits.compiles_ahead:
        made += sorted(set(flags))
    if topology.traits.shares_machine:
        made.append(f"{topology.host_cores} cores of {_processor()}")
    return ", ".join(made) or "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
