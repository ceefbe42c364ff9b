"""What is to be planned: one program, read, with what is asked of its plan."""

import dataclasses

from autoshard.base.crew import Crew
from autoshard.cost import Calibration, Mesh
from autoshard.plan.model._asked import Asked, Required, require
from autoshard.plan.model._model import Model
from autoshard.plan.price._path_tables import PathTables
from autoshard.plan.price._reading import Reading, build_model
from autoshard.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """The same for every mesh."""

    program: Program
    reading: Reading
    asked: Asked
    memory_limit: int
    """Bytes of one device that no plan may pass."""
    seed: int
    calibration: Calibration
    tables: PathTables | None = None
    """Tables of the paths of other programs, priced with the same figures."""
    stages: int = 0
    """How many stages a pipeline has whose meshes have an axis `stage` of as many devices, for stages alone."""

    def priced(self, mesh: Mesh) -> Model:
        """Its decisions on a mesh, with their prices."""
        limit, staged = self.memory_limit, bool(self.stages)
        return build_model(self.program, self.reading, mesh, limit, self.calibration, self.tables, staged)

    def required(self, model: Model) -> Required:
        """What is asked for on a mesh. Raises `UserError` if it cannot hold there."""
        return require(model, self.reading.groups, self.asked)


def share(crew: Crew, program: Program, reading: Reading) -> None:
    """With a crew, what all prices refer to. What runs the program cannot be sent, and is not needed to plan it."""
    sent = dataclasses.replace(program, fn=_stays_here, args=(), make_args=None, source=None, lowerings=None)
    crew.share("program", program, sent)
    for name in ("graph", "structure", "liveness"):
        crew.share(name, getattr(reading, name))
    crew.share("reading", reading)


def _stays_here(*args: object) -> None:
    raise RuntimeError("a helper cannot run the program")
