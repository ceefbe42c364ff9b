"""`autoshard.plan(program, ...)`: the public function."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from autoshard.plan._plan import Plan


if TYPE_CHECKING:
    from autoshard.program import Program


def plan(
    program: "Program | str",
    *,
    topology: str,
    mesh: "str | Mapping[str, int] | None" = None,
    memory_limit: int | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Choose a sharding for every tensor of `program` on `topology`.

    `program` is a `Program` (see `autoshard.trace`) or what the command takes (`"model.py"`, `"hf:gpt2"`).
    `topology` names chips and shape, such as `"v5p:4x8x8"` or `"cpu:8"`. `mesh` gives axes and sizes, such as
    `{"data": 32, "model": 8}` or `"data=32,model=8"`; without it `XLA_AUTO_SPMD_MESH` is read, and without that
    all devices form one axis `data`. `memory_limit` is in bytes of one device (default: the chip's usable memory),
    `time_limit` in seconds for the solver. `progress` is called with one line at the start of every phase.

    Raises `UserError` for bad input, and `InfeasibleError` when no plan keeps within the memory limit.
    """
    from autoshard.plan import make_plan
    from autoshard.program import open_source

    if isinstance(program, str):
        program = open_source(program)
    return make_plan(
        program,
        topology=topology,
        mesh=mesh,
        memory_limit=memory_limit,
        time_limit=time_limit,
        seed=seed,
        progress=progress,
        save_problem=None,
    ).plan
