"""Options of the steps of torch modules: the names that users write, and the records that they become."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypedDict

from autoshard.errors import UserError
from autoshard.program.jax.layer_stack import Pipeline, read_pipeline
from autoshard.program.kernels.eight_bits import EightBits, parse_eight_bits
from autoshard.program.moe.experts import ExpertForm
from autoshard.program.torch.layer_remat import parse_remat


class StepOptions(TypedDict, total=False):
    """Options that `from_torch` and `from_config` share; an option that is None or absent has its default.

    `from_torch` describes each of them.
    """

    train: bool | None
    optimizer: str | None
    dtype: str | None
    param_dtype: str | None
    state_dtype: str | None
    microbatches: int | None
    gradient_groups: int | None
    remat: str | None
    scan: bool | None
    attention: str | None
    exchange: str | None
    experts: str | None
    capacity_factor: float | None
    imbalance: float | None
    stages: int | None
    schedule: str | None
    lora: str | None
    quantize: str | None


class ModuleOptions(StepOptions, total=False):
    """Options of `from_torch`, which describes each of them."""

    batch_statistics: bool | None
    cast_inputs: bool | None


class ConfigOptions(StepOptions, total=False):
    """Options of `from_config`, which describes each of them."""

    infer: bool | None
    batch: int | None
    seq: int | None
    image: int | None
    pad: str | None
    loss_chunks: str | None
    serve: str | None
    cache: int | None
    sample: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options that turn a forward function into a training step."""

    optimizer: str = "adamw"
    """Name of an optimizer of `optimizers.make_optimizer`."""
    state_dtype: str = "float32"
    """Dtype of the optimizer's moments."""
    microbatches: int = 1
    """Parts of the batch that are computed one after another; 1 in a pipeline, which has its own microbatches."""
    gradient_groups: int = 1
    """Parts of each microbatch (of the batch in a pipeline) whose gradients are summed only after all microbatches."""
    own_loss: bool = False
    """True if the user gave the loss, which need not be a mean over examples."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerForms:
    """The forms in which the layers of a module are computed."""

    remat: str = "none"
    """Text of the rematerialisation policy, such as `full:20+none`."""
    scan: bool = True
    """False leaves repeated layers unscanned."""
    attention: str = "plain"
    """Kernel of `scaled_dot_product_attention`: `plain`, `splash`, `cudnn` or `auto`."""
    exchange: str = "auto"
    """Exchange of attention over a split sequence: `gather`, `heads`, `ring` or `auto`."""
    experts: ExpertForm | None = None
    """Dispatch of tokens to the experts of a mixture; None for the default form."""
    capacity_factor: float | None = None
    """Slots of an expert, as a multiple of an even share of the tokens; None for the default."""
    imbalance: float = 1.0
    """Tokens of the busiest device of experts, relative to the mean over devices; at least 1."""
    pipeline: Pipeline | None = None
    """Stages that the repeated layers are cut into; None for none."""
    quantize: EightBits | None = None
    """Form of 8 bits in which linear layers are multiplied; None for none."""


def given_options(function: str, kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None, without checks of their values.

    - `function`: name of the caller in the error.
    - `kind`: `TypedDict` of the known options.

    Raises `TypeError` for an option that `kind` does not have, even if it is None.
    """
    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {name: value for name, value in options.items() if value is not None}


def read_layers(given: Mapping[str, Any]) -> LayerForms:
    """Return the forms of layers from given options; absent ones have the defaults of `LayerForms`.

    `experts` stays None, since that form depends on the module. One stage, or no `stages`, makes no pipeline.

    Raises `UserError` for a remat policy or a form of 8 bits that cannot be parsed, and for a pipeline that cannot be.
    8 bits in a forward pass, and of adapters, raise it too.
    """
    names = ("remat", "scan", "attention", "exchange", "capacity_factor", "imbalance")
    forms = LayerForms(**{name: given[name] for name in names if name in given})
    parse_remat(forms.remat)
    form = parse_eight_bits(given.get("quantize"))
    if form is not None and not given.get("train"):
        raise UserError("--quantize is for training steps; add --train, or leave it out.")
    if form is not None and given.get("lora") is not None:
        raise UserError("--quantize: frozen weights have no training in 8 bits; leave it or --lora out.")
    pipeline = read_pipeline(*(given.get(name) for name in ("stages", "microbatches", "schedule")))
    return dataclasses.replace(forms, pipeline=pipeline, quantize=form)


def read_training(given: Mapping[str, Any], layers: LayerForms, own_loss: bool = False) -> TrainOptions | None:
    """Return the options of training; None for a forward pass (`train` absent or false).

    With a pipeline in `layers`, `microbatches` stays 1: a pipeline's microbatches have no backward passes of their own.
    """
    if not given.get("train"):
        return None
    names = ("optimizer", "state_dtype", "gradient_groups", *(() if layers.pipeline is not None else ("microbatches",)))
    return TrainOptions(own_loss=own_loss, **{name: given[name] for name in names if name in given})
