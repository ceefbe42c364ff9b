"""Typed facts about how a plan was made, read from its `provenance`."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Place of a plan's program, and the options with which `open_source` opens it again."""

    program: str = ""
    """A file, or `hf:` and a configuration; empty if the plan does not name one."""
    entry: str = "program"
    """Name that a Python file gives the program."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the source by name, such as `train` and `batch`."""
    preferred: dict[str, Any] | None = None
    """Values that `open_source` prefers where the program leaves a choice; None for none."""
    recipe: dict[str, Any] | None = None
    """Values of the program's own choices, by name."""

    @property
    def is_configuration(self) -> bool:
        """True for a Hugging Face configuration (`hf:`)."""
        return self.program.startswith("hf:")


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeChoice:
    """Recipe that the planner chose, and those that it considered."""

    chosen: dict[str, Any]
    """Value of each choice by name."""
    tried: tuple[dict[str, Any], ...]
    """Rows as in the plan file, the chosen one first; see docs/json.md."""
    meshes_of: dict[str, Any] | None = None
    """Choices of the recipe that the rows of `Plan.meshes` belong to; None for the chosen one."""

    @property
    def rejected(self) -> tuple[dict[str, Any], ...]:
        """Rows of the recipes that were not chosen, those with a verdict."""
        return tuple(row for row in self.tried if row.get("verdict"))


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Facts about how a plan was made that later steps depend on."""

    source: Source | None
    """Place of the program; None if unknown, as for programs made in Python."""
    recipe: RecipeChoice | None
    """Recipe of the plan; None if none was chosen."""
    flags: tuple[str, ...]
    """Compiler flags that the step is to run with."""
    flag_prices: tuple[str, ...]
    """Sentences on the prices that the flags change."""
    observations: int
    """Observations to which the figures of the prices were fitted; 0 for the shipped figures."""
    flag_sets: dict[str, float]
    """Seconds that a step of this plan takes with each named set of compiler flags that gains enough to be proposed."""
    form: str
    """Export form that the plan was restricted to; empty for none."""
    not_held: tuple[str, ...]
    """Baselines that are faster than the plan, and that its form cannot hold as they are priced."""
    form_axes: dict[str, str]
    """Parallelism that MaxText is given for each axis, by the search within its form."""
    staged: bool
    """True if an axis of the mesh stands for the stages of a pipeline."""
    eager: bool
    """True if the step is priced as a framework runs it op by op (`Form.eager`), not as XLA compiles it."""
    asked: tuple[str, ...]
    """Constraints of the user, one line each."""
    pinned: dict[str, str]
    """Tensor name -> the constraint that fixes its spec."""
    program_constraints: tuple[str, ...]
    """Sharding constraints that the program states, one sentence each."""
    lifted: str
    """Constraints that were removed from the program: a value of `Lifted`, empty for none."""
    on_host: str
    """Arguments that the host stores: a value of `HOSTS`."""
    tokens: int | None
    """Tokens of one step; None for a program that does not count tokens."""
    computes_in: str
    """Dtype of the operands of most matrix FLOPs; empty without products, and in plans of older versions."""
    multiplies_in: str
    """Dtype that the compiler rounds these operands to; empty if it rounds nothing."""
    padded_flops: float
    """FLOPs with the pads of dims that are split unevenly, over those without; 1 where that is not noticeable."""
    padded: str
    """The dim with the most such pads, in words; empty where that is not noticeable."""
    jax_version: str | None
    """Version of JAX that made the plan; None if unknown."""

    @property
    def names_devices(self) -> bool:
        """True if the program may name devices, in constraints that it states or that were removed."""
        return bool(self.program_constraints or self.lifted)


def read_origin(provenance: Mapping[str, Any]) -> Origin:
    """Return the facts that a plan's `provenance` states; `check_plan` has checked the types.

    Absent ones are empty, or None where the field allows it; `on_host` is then `none`. Unknown keys of the source are
    ignored.
    """
    source, recipe = provenance.get("source"), provenance.get("recipe")
    flags, learned = provenance.get("xla_flags") or {}, provenance.get("learned") or {}
    fields = {field.name for field in dataclasses.fields(Source)}
    return Origin(
        source=Source(**{key: value for key, value in source.items() if key in fields}) if source else None,
        recipe=_recipe_choice(recipe) if recipe else None,
        flags=tuple(flags.get("flags", ())),
        flag_prices=tuple(flags.get("priced", ())),
        observations=learned.get("observations", 0) if learned.get("figures") else 0,
        flag_sets=dict(provenance.get("flag_sets") or {}),
        form=provenance.get("for", ""),
        not_held=tuple(provenance.get("not_held", ())),
        form_axes=dict(provenance.get("maxtext", {})),
        staged="stage_axis" in provenance,
        eager=bool(provenance.get("eager")),
        asked=tuple(provenance.get("asked", ())),
        pinned=dict(provenance.get("pinned", {})),
        program_constraints=tuple(provenance.get("said_by_program", ())),
        lifted=provenance.get("lifted_constraints", ""),
        on_host=provenance.get("on_host", "none"),
        tokens=provenance.get("tokens"),
        computes_in=provenance.get("computes_in", ""),
        multiplies_in=provenance.get("multiplies_in", ""),
        padded_flops=provenance.get("padded", {}).get("flops", 1.0),
        padded=provenance.get("padded", {}).get("words", ""),
        jax_version=provenance.get("versions", {}).get("jax"),
    )


def _recipe_choice(recipe: Mapping[str, Any]) -> RecipeChoice:
    """Return the recipe that an entry of the provenance states."""
    return RecipeChoice(recipe.get("chosen", {}), tuple(recipe.get("tried", ())), recipe.get("meshes_of"))
