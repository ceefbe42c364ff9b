"""What a program itself says about shardings: told to the user, and lifted where the user asks for it."""

import dataclasses

from autoshard import mlir
from autoshard.program._program import Lifted, Program
from autoshard.program._serialise import serialise


def sharding_notes(said: mlir.SaidCounts, lifted: bool = False) -> tuple[str, ...]:
    """What a plan has to respect, and what it does not; with `lifted`, what is taken out on the user's word."""
    notes: list[str] = []
    if said.constraints:
        kept = "they are lifted, as you asked" if lifted else "they are respected"
        notes.append(f"The program itself holds {said.constraints} sharding constraints; {kept}.")
    if said.regions:
        notes.append(
            f"The program itself holds {said.regions} regions sharded by hand (shard_map); they are respected."
        )
    if said.arguments:
        kept = "this is lifted, as you asked" if lifted else "this is respected"
        notes.append(f"The program itself says how {said.arguments} arguments are split; {kept}.")
    if said.idle:
        notes.append(
            f"The program holds {said.idle} shardings on a mesh of one device, which say nothing of how to split: they "
            "are left out. Trace it under a mesh of the size that you plan for (an AbstractMesh will do) to keep them."
        )
    return tuple(notes)


def lift_constraints(program: Program) -> Program:
    """The same program without its own sharding constraints and specs of arguments; regions by hand stay.

    What such a program is run as has none either. The same record if there is nothing to lift.
    """
    with mlir.new_context() as context:
        module = mlir.parse_module(program.module, context)
        said = mlir.count_said(module)
        if not said.constraints and not said.arguments:
            return program
        old, new = sharding_notes(said), sharding_notes(said, lifted=True)
        mlir.drop_constraints(module)
        body, fingerprint = serialise(module, program.arguments)
    notes = (*(note for note in program.notes if note not in old), *new)
    return dataclasses.replace(program, module=body, fingerprint=fingerprint, notes=notes, lifted=Lifted.ALL)
