"""Modules of one traced step for each platform, since JAX lowers some ops differently on each."""

import dataclasses
from collections.abc import Callable, Mapping

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.program.program_record import Lifted, Program


PLATFORMS: tuple[str, ...] = ("cpu", "cuda", "tpu")
"""XLA's names of the platforms that programs are lowered for."""


class Lowerings:
    """Modules by platform, lowered on demand."""

    def __init__(self, lower: Callable[[str], bytes], known: Mapping[str, bytes]) -> None:
        """Store the modules that are `known`; `lower` raises for a platform on which the step has no lowering."""
        self._lower = lower
        self._known: dict[str, bytes | Exception] = dict(known)
        self.programs: dict[tuple[int, str], tuple[Program, Program]] = {}
        """(id, platform) -> a program and the same program lowered for the platform, so that each has one record."""

    def module(self, platform: str) -> bytes:
        """Return the MLIR bytecode for a platform. Raises JAX's own error if it has no lowering; both are cached.

        A lack of memory is raised too, but not cached: the same lowering may succeed later.
        """
        if platform not in self._known:
            try:
                self._known[platform] = self._lower(platform)
            except MemoryError:
                raise
            except Exception as error:
                self._known[platform] = error
        known = self._known[platform]
        if isinstance(known, Exception):
            raise known
        return known


def lowered_for(program: Program, platform: str) -> Program:
    """Return the program as lowered for `platform`, with the same fingerprint, and the same record at every call.

    It is unchanged if it is lowered for the platform already, or if it has one lowering only.

    A note says so if JAX has no lowering for the platform. Callbacks are an example: they run on the host that traced
    them.
    """
    if program.platform == platform or program.lowerings is None:
        return program
    programs = program.lowerings.programs
    key = id(program), platform
    if key not in programs:
        programs[key] = program, _lowered(program, platform)
    return programs[key][1]


def _lowered(program: Program, platform: str) -> Program:
    """Return the program with its module for `platform`; with a note instead if JAX has no lowering for it."""
    try:
        module = program.lowerings.module(platform)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        why = (str(error).strip().splitlines() or ["no message"])[0]
        note = (
            f"The program is planned as JAX lowers it for {program.platform}, since it does not for {platform} here "
            f"({why[:200]})."
        )
        return dataclasses.replace(program, lowerings=None, notes=(*program.notes, note))
    if program.lifted is Lifted.ALL:
        with mlir.new_context() as context:
            module = mlir.to_bytes(mlir.drop_constraints(mlir.parse_module(module, context)))
    return dataclasses.replace(program, module=module, platform=platform)
