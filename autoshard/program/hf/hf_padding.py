"""Padding of a configuration's vocabulary, heads and inner widths, so that more devices divide them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from autoshard.base.named_counts import read_counts
from autoshard.errors import UserError
from autoshard.program.hf.hf_eager import eager_model, reduced_fields
from autoshard.program.hf.hf_model import build_model, runnable_part
from autoshard.program.program_record import Program


_FORM = "128 (of the vocabulary), or vocabulary=128,heads=8,width=256"
_FIELDS = {"vocabulary": "vocab_size", "heads": "num_attention_heads", "width": "intermediate_size"}
"""Kind of size that may be padded -> its field in a text configuration."""


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedSizes:
    """Numbers of which sizes become multiples; 1 leaves a size as it is."""

    vocabulary: int = 1
    """Divisor of the number of classes."""
    heads: int = 1
    """Divisor of the number of attention heads; key-value heads keep their share of them."""
    width: int = 1
    """Divisor of the inner width of feed-forward layers."""


def parse_padding(text: str | None) -> PaddedSizes | None:
    """Return the padding of `128`, `none` or `vocabulary=128,heads=8,width=256`; None for none.

    Raises `UserError` for other texts, and for numbers below 1.
    """
    if text in (None, "none"):
        return None
    padding = PaddedSizes(**read_counts("--pad", text, tuple(_FIELDS), _FORM))
    return None if padding == PaddedSizes() else padding


def check_beside(padding: PaddedSizes, given: Mapping[str, Any]) -> None:
    """Raise `UserError` for options of training whose results padding would change.

    Updates by Adafactor are divided by a mean over the whole tensor, and those by Muon depend on its shape.
    """
    inner = padding.heads > 1 or padding.width > 1
    for option, value, joins in (
        ("optimizer", "adafactor", True), ("optimizer", "muon", inner), ("lora", given.get("lora"), True)
    ):  # fmt: skip
        if joins and value is not None and given.get(option) == value:
            raise UserError(f"--pad: zeros would change the updates of --{option} {value}; leave one of them out.")


@dataclasses.dataclass(frozen=True, slots=True)
class Padded:
    """A model whose sizes were padded."""

    model: Any
    classes: int | None
    """Size of the vocabulary before; None if it is not padded."""
    shapes: dict[str, tuple[int, ...]]
    """Padded parameter of the model -> its shape before."""
    notes: tuple[str, ...]
    """Sentences on the model, and on the sizes before and after."""
    weights: tuple[int, int]
    """Weights of linear layers before and after."""
    heads: float
    """Share of the heads that the model had before."""

    def program(self, program: Program) -> Program:
        """Return the program of the padded model with the FLOPs of the one before, and zeros in generated arguments."""

        generated = program.make_args
        assert generated is not None, "models have generated arguments"

        def make_args(seed: int) -> tuple[Any, ...]:
            """Return arguments of a seed with zeros in the padded parts of parameters."""
            params, *rest = generated(seed)
            cut = {name: self.shapes.get(members[0]) for name, members in program.weights.items()}
            return {name: _zeroed(array, cut.get(name)) for name, array in params.items()}, *rest

        flops = program.model_flops
        if flops is not None and program.tokens is not None:
            products = (6 if program.training else 2) * program.tokens
            flops = products * self.weights[0] + (flops - products * self.weights[1]) * self.heads
        return dataclasses.replace(program, model_flops=flops, make_args=make_args, unpadded=self.shapes)


def _zeroed(array: Any, shape: tuple[int, ...] | None) -> Any:
    """Return an array, or a stack of such, with zeros beyond `shape`; the array itself for None."""
    import numpy as np

    if shape is None:
        return array
    place = (..., *(slice(0, size) for size in shape))
    zeros = np.zeros_like(array)
    zeros[place] = array[place]
    return zeros


def padded_model(model: Any, fields: dict[str, Any], padding: PaddedSizes, name: str, dtype: str) -> Padded:
    """Return the model of a configuration with padded sizes.

    Zeros in the padded parts of weights stay zeros in training: a head or a unit that reads and writes nothing has no
    gradient. Padded classes are to be masked by the loss.

    - `model`: the model of `fields` without padding.
    - `name`: name of the model in errors; `dtype`: torch's name of the dtype of weights.

    Raises `UserError` for sizes that the configuration lacks. Raises it for weights in which zeros at the end would
    change the model, and if transformers computes other logits for a small padded model.
    """
    sizes: dict[str, tuple[int, int]] = {}
    padded, notes = _built(name, fields, dtype, padding, sizes)
    shapes = _grown(model, padded, sizes, name)
    if sizes.keys() - {"vocabulary"}:
        _check_small(fields, sizes, name)
    if shapes:
        words = ", ".join(f"{kind} {before:,} to {after:,}" for kind, (before, after) in sizes.items())
        notes = (*notes, f"Padded with zeros: {words}; results and updates are those without padding.")
    heads = sizes.get("heads", (1, 1))
    weights = _linear_weights(model), _linear_weights(padded)
    return Padded(padded, sizes.get("vocabulary", (None,))[0], shapes, notes, weights, heads[0] / heads[1])


def _linear_weights(model: Any) -> int:
    """Return the number of weights of a model's linear layers."""
    import torch

    return sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))


def _built(
    name: str, fields: dict[str, Any], dtype: str, padding: PaddedSizes, sizes: dict[str, tuple[int, int]]
) -> tuple[Any, tuple[str, ...]]:
    """Build the model of a configuration with padded sizes, as `runnable_part`; add the changed sizes to `sizes`."""
    return runnable_part(build_model(name, fields, dtype, lambda config: sizes.update(_pad(config, padding, name))))


def _pad(config: Any, padding: PaddedSizes, name: str) -> dict[str, tuple[int, int]]:
    """Pad a configuration of transformers in place, and return the changed sizes by kind, before and after.

    Raises `UserError` for sizes that it lacks.
    """
    text = config.get_text_config()
    sizes: dict[str, tuple[int, int]] = {}
    for kind, field in _FIELDS.items():
        multiple, before = getattr(padding, kind), getattr(text, field, 0)
        if multiple == 1:
            continue
        # Without a width of its own, a head would become narrower.
        needed = {field: before} | ({"head_dim": getattr(text, "head_dim", 0)} if kind == "heads" else {})
        if lacking := [key for key, size in needed.items() if not size]:
            raise UserError(
                f"--pad: the configuration of `{name}` has no `{lacking[0]}`, so its {kind} stay as they are."
            )
        after = before + -before % multiple
        shared = getattr(text, "num_key_value_heads", None) if kind == "heads" else None
        if shared:
            # Query heads share key-value heads in groups of one size, so whole groups are added.
            after = before + -before % math.lcm(multiple, before // shared)
            text.num_key_value_heads = after // (before // shared)
            sizes["key-value heads"] = (shared, text.num_key_value_heads)
        setattr(text, field, after)
        sizes[kind] = (before, after)
    return {kind: pair for kind, pair in sizes.items() if pair[0] != pair[1]}


def _grown(model: Any, padded: Any, sizes: Mapping[str, tuple[int, int]], name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes before of the parameters that padding changes.

    Raises `UserError` for a parameter that joins padded parts. Only linear layers and embeddings are padded: zeros
    change a norm over all heads.
    """
    import torch

    width = getattr(model.config.get_text_config(), "head_dim", 1)
    known = {tuple(size * (width if "heads" in kind else 1) for size in pair) for kind, pair in sizes.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    before = dict(model.named_parameters())
    for full, parameter in padded.named_parameters():
        old, new = tuple(before[full].shape), tuple(parameter.shape)
        if old == new:
            continue
        module = padded.get_submodule(full.rpartition(".")[0])
        changed = {pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]}
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding) or not changed <= known:
            raise UserError(
                f"--pad: zeros at the end of `{full}` {list(old)} of `{name}` would change the model; pad other sizes, "
                "or none."
            )
        shapes[full] = old
    return shapes


def _check_small(fields: dict[str, Any], sizes: Mapping[str, tuple[int, int]], name: str) -> None:
    """Raise `UserError` if transformers computes other logits for a small model of the configuration once padded."""
    import torch

    small = reduced_fields(fields)
    model = eager_model(runnable_part(build_model(name, small, "float32"))[0], 0)
    text = model.config.get_text_config()
    # One more than each size pads it, by as little as is possible.
    numbers = {kind: getattr(text, _FIELDS[kind]) + 1 for kind in sizes if kind in _FIELDS}
    padded = eager_model(_built(name, small, "float32", PaddedSizes(**numbers), {})[0], 0)
    zeroed = {}
    for key, value in model.state_dict().items():
        room = torch.zeros_like(padded.state_dict()[key])
        room[tuple(slice(0, size) for size in value.shape)] = value
        zeroed[key] = room
    padded.load_state_dict(zeroed)
    ids = torch.arange(2 * 16).reshape(2, 16) % text.vocab_size
    with torch.no_grad():
        logits, others = (each(input_ids=ids)["logits"] for each in (model, padded))
    if not torch.allclose(logits, others[..., : logits.shape[-1]], rtol=1e-4, atol=1e-4 * float(logits.abs().max())):
        raise UserError(
            f"--pad: a small `{name}` has other logits in transformers with zeros for more "
            f"{' and '.join(kind for kind in sizes if kind in _FIELDS)}; pad other sizes, or none."
        )
