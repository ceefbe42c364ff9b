"""What a program itself says about shardings: told to the user, and lifted where the user asks for it."""

import dataclasses

from autoshard import mlir
from autoshard.program._program import Lifted, Program
from autoshard.program._serialise import serialise


def sharding_notes(said: mlir.SaidCounts, lifted: bool = False) -> tuple[str, ...]:
    """What a plan has to respect, and what it does not; with `lifted`, what is taken out on the user's word."""
    notes: list[str] = []
    if said.constraints:
        one = said.constraints == 1
        held = "1 sharding constraint; it is" if one else f"{said.constraints} sharding constraints; they are"
        notes.append(f"The program itself holds {held} {'lifted, as you asked' if lifted else 'respected'}.")
    if said.regions:
        held = "1 region" if said.regions == 1 else f"{said.regions} regions"
        kept = "it is" if said.regions == 1 else "they are"
        notes.append(f"The program itself holds {held} sharded by hand (shard_map); {kept} respected.")
    if said.arguments:
        kept = "this is lifted, as you asked" if lifted else "this is respected"
        split = "1 argument is" if said.arguments == 1 else f"{said.arguments} arguments are"
        notes.append(f"The program itself says how {split} split; {kept}.")
    if said.idle:
        one = said.idle == 1
        held, kept = ("1 sharding", "it is") if one else (f"{said.idle} shardings", "they are")
        notes.append(
            f"The program holds {held} on a mesh of one device, which says nothing of how to split: {kept} left out. "
            "Trace it under a mesh of the size that you plan for (an AbstractMesh will do) to keep what it says."
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
