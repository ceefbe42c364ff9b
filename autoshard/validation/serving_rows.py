"""Measured serving steps: prefill and decode of a decoder with stated layouts of weights and attention.

The names of layouts are those of Pope et al. (Efficiently Scaling Transformer Inference, 2022). Weights are stationary
(`WS 1D`, `WS 2D`), or are gathered over one, two or three axes of the torus (`WG X`, `WG XY`, `WG XYZ`).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Topology, load_calibration, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.solve.mesh_solve import Terms, solve_within
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.space.baselines import Baseline
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.named_layouts import Uses, stated, stationary
from autoshard.program import Program, config_program
from autoshard.serving import Decoder
from autoshard.validation.pair_dims import stated_decoder, whole_number
from autoshard.validation.pair_options import stated_topology
from autoshard.validation.published_runs import IncompleteError


_SOLVE_S = 20.0
"""Time limit in seconds for completing one stated layout."""
_FAMILIES = {"palm": {"vocab": 256_000, "tied_head": True}}
"""Dims of a family for rows that do not state them (Chowdhery et al. 2022, section 2)."""
_PHASE = re.compile(r"(prefill|decode) (\d+)")
"""Phase and tokens of each sequence."""
_LAYOUT = re.compile(r"WS [12]D|WG X(?:YZ?)?")
"""Layouts of weights that can be rebuilt."""
SERVING_KEYS = frozenset({"ffn", "attention", "batch", "phase", "dtype"})
"""Allowed keys of a plan that has a `phase`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingRun:
    """One measured prefill, or a number of decode steps."""

    decoder: Decoder
    parallel: bool
    """True if attention and MLP of a layer have the same input, and their outputs are summed."""
    topology: Topology
    phase: str
    """Phase of serving: `prefill` or `decode`."""
    batch: int
    """Number of sequences that are served at once."""
    seq: int
    """Tokens of each sequence in the measured time: one step of a prefill, or as many decode steps."""
    context: int
    """Tokens in the cache before the measured time; 0 for a prefill."""
    layout: str
    """Layout of the weights: `WS 1D`, `WS 2D`, `WG X`, `WG XY` or `WG XYZ`."""
    by_batch: bool
    """True if attention is split over all devices by sequence of the batch, False if by heads."""
    assumed: tuple[str, ...]
    """Choices that the source leaves open, as text."""

    @property
    def steps(self) -> int:
        """Number of steps of the program in the measured time."""
        return self.seq if self.phase == "decode" else 1

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags of the run; empty, because sources of serving state none."""
        return ()


def read_serving(group: Mapping[str, Any], plan: Mapping[str, Any]) -> ServingRun:
    """Parse the plan of a row, which has a `phase` such as `prefill 2048` or `decode 64`.

    Raises `IncompleteError` with the value that is missing or cannot be rebuilt.
    """
    unknown = sorted(set(plan) - SERVING_KEYS)
    if unknown:
        raise IncompleteError(f"{unknown[0]}={plan[unknown[0]]} is not rebuilt in serving")
    dtype = str(plan.get("dtype", "bf16"))
    if not re.match(r"bf(loat)?16", dtype):
        raise IncompleteError(f"dtype {dtype!r} is not rebuilt: weights of 16 bits are")
    phase = _PHASE.fullmatch(str(plan["phase"]))
    if phase is None or int(phase[2]) < 1:
        raise IncompleteError(f"phase={plan['phase']!r} is neither `prefill TOKENS` nor `decode TOKENS`")
    layout, attention = str(plan.get("ffn", "")), str(plan.get("attention", ""))
    if not _LAYOUT.fullmatch(layout):
        raise IncompleteError(f"ffn={layout!r} is no layout of weights that is known (WS 1D, WS 2D, WG X, XY, XYZ)")
    if attention not in ("heads", "batch"):
        raise IncompleteError(f"attention={attention!r} is neither split by heads nor by batch")
    assumed: list[str] = []
    decoder, parallel = _decoder(group["model"], assumed)
    context = _context(group, assumed) if phase[1] == "decode" else 0
    return ServingRun(
        decoder, parallel, stated_topology(group, assumed), phase[1], whole_number(plan, "batch"), int(phase[2]),
        context, layout, attention == "batch", tuple(assumed),
    )  # fmt: skip


def _decoder(model: Any, assumed: list[str]) -> tuple[Decoder, bool]:
    """Return the decoder, and True if attention and MLP are parallel; dims that the family implies are added to
    `assumed`.
    """
    if not isinstance(model, dict):
        raise IncompleteError("the model's dims are not stated")
    family = str(model.get("family", "")).lower()
    known = next((given for name, given in _FAMILIES.items() if family.startswith(name)), {})
    added = {key: value for key, value in known.items() if key not in model}
    assumed += [f"{key} {value} of {model.get('family')}" for key, value in added.items()]
    decoder = stated_decoder({**model, **added, "parallel_block": False}, {})
    if decoder.experts > 1 or decoder.latent is not None:
        raise IncompleteError("serving of experts, or of latent attention, is not rebuilt")
    return decoder, bool(model.get("parallel_block"))


def _context(group: Mapping[str, Any], assumed: list[str]) -> int:
    """Return the tokens in the cache before decoding: the group's `context`, else the tokens of its prefills.

    The latter are added to `assumed`. Raises `IncompleteError` if there are no prefills, or they differ.
    """
    fixed = group.get("fixed")
    if isinstance(fixed, dict) and "context" in fixed:
        return whole_number(fixed, "context")
    phases = [_PHASE.fullmatch(str(row["plan"].get("phase"))) for row in group["rows"] if isinstance(row["plan"], dict)]
    lengths = {int(phase[2]) for phase in phases if phase is not None and phase[1] == "prefill"}
    if len(lengths) != 1:
        raise IncompleteError("the context length of the decoded tokens is not stated")
    assumed.append(f"a context of {max(lengths)} tokens, as the prefills have")
    return lengths.pop()


def rebuild_serving(run: ServingRun) -> tuple[Model, NDArray[np.int64]]:
    """Return the model of one step's program, and its stated layout as choices.

    The solver makes the choices that the stated layout leaves open. Raises `IncompleteError` if the model's sizes do
    not allow the layout.
    """
    sizes = _mesh_sizes(run)
    mesh = make_mesh(run.topology, {name: size for name, size in sizes.items() if size > 1})
    program = _program(run)
    reading = analyse_program(program, mesh.topology)
    model = build_model(program, reading, mesh, run.topology.usable_bytes, load_calibration(run.topology.chip))
    axes = {name: [k] for k, name in enumerate(mesh.names)}
    wanted = _laid_out(run, model, reading.groups, axes.get("x", []), axes.get("yz", []))
    if wanted is None:
        raise IncompleteError(f"the model's sizes do not allow {run.layout} with attention split otherwise")
    solved = solve_within(model, normalise(even_weights(model)), Terms(None, _SOLVE_S, 0, allowed=wanted.allowed))
    return model, solved.choices


def _mesh_sizes(run: ServingRun) -> dict[str, int]:
    """Return the devices along the axes `x` and `yz`.

    `x` splits the width, or is the axis over which weights are gathered; `yz` splits ffn and heads.
    """
    devices, shape = run.topology.num_devices, run.topology.shape
    if run.layout == "WS 1D":
        return {"x": 1, "yz": devices}
    if run.layout == "WS 2D":
        # Half the root of the number of devices has the least traffic for an MLP four times as wide as the model (Pope
        # et al. 2022, section 3.2.2).
        x = 2 ** max(0, round(math.log2(math.sqrt(devices) / 2)))
    else:
        x = math.prod(shape[: len(run.layout) - len("WG ")])
    return {"x": x, "yz": devices // x}


def _program(run: ServingRun) -> Program:
    """Build the program of one step; a decoding step has the cache at the end of the measured time.

    Raises `IncompleteError` for MLPs without a gate.
    """
    decoder = run.decoder
    if not decoder.gated:
        raise IncompleteError("serving of MLPs without a gate is not rebuilt")
    fields: dict[str, Any] = {
        "bos_token_id": None,  # a family's default may lie outside of the vocabulary
        "eos_token_id": None,
        "model_type": "cohere" if run.parallel else "llama",  # Cohere's layers have parallel attention and MLP
        "hidden_size": decoder.width,
        "intermediate_size": decoder.mlp_width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_size,
        "vocab_size": decoder.vocabulary,
        "tie_word_embeddings": decoder.tied,
    }
    length = run.context + run.seq
    return config_program(fields, serve=run.phase, batch=run.batch, seq=length)


def _laid_out(run: ServingRun, model: Model, groups: Groups, x: list[int], yz: list[int]) -> Baseline | None:
    """Return the states that the run's layout allows; None if the model's sizes do not allow the layout.

    `x` and `yz` are the numbers of these mesh axes, empty for an axis of size 1.
    """
    if run.layout.startswith("WG"):
        return stated(model, groups, run.layout, Uses([], x, yz, holds_head=False))
    return stationary(model, groups, run.layout, x, yz, by_batch=run.by_batch)
