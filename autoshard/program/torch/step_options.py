"""Options of the steps of torch modules: the names that users write, and the records that they become."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypedDict

from autoshard.program.jax.layer_stack import Pipeline, read_pipeline
from autoshard.program.moe.experts import ExpertForm
from autoshard.program.torch.layer_remat import parse_remat


class StepOptions(TypedDict, total=False):
    """Options that modules and configurations share; an option that is None has its default."""

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


class ModuleOptions(StepOptions, total=False):
    """Options of `from_torch`."""

    batch_statistics: bool | None
    cast_inputs: bool | None


class ConfigOptions(StepOptions, total=False):
    """Options of `from_config`."""

    infer: bool | None
    batch: int | None
    seq: int | None
    image: int | None
    serve: str | None
    cache: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options that turn a forward function into a training step."""

    optimizer: str = "adamw"
    state_dtype: str = "float32"
    microbatches: int = 1
    """Parts of the batch that are computed one after another."""
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
    """Kernel of `scaled_dot_product_attention`."""
    exchange: str = "auto"
    """Exchange of attention over a split sequence."""
    experts: ExpertForm | None = None
    """Dispatch of tokens to the experts of a mixture."""
    capacity_factor: float | None = None
    imbalance: float = 1.0
    pipeline: Pipeline | None = None
    """Stages that the repeated layers are cut into."""


def given_options(function: str, kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None. Raises `TypeError` for one that `kind`, a `TypedDict`, does not have."""
    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {name: value for name, value in options.items() if value is not None}


def read_layers(given: Mapping[str, Any]) -> LayerForms:
    """Return the forms of layers, without that of experts, which depends on the module.

    Raises `UserError` for a remat policy or a pipeline that cannot be.
    """
    names = ("remat", "scan", "attention", "exchange", "capacity_factor", "imbalance")
    forms = LayerForms(**{name: given[name] for name in names if name in given})
    parse_remat(forms.remat)
    pipeline = read_pipeline(*(given.get(name) for name in ("stages", "microbatches", "schedule")))
    return dataclasses.replace(forms, pipeline=pipeline)


def read_training(given: Mapping[str, Any], layers: LayerForms, own_loss: bool = False) -> TrainOptions | None:
    """Return the options of training; None for a forward pass.

    The microbatches of a pipeline have no backward passes of their own.
    """
    if not given.get("train"):
        return None
    names = ("optimizer", "state_dtype", "gradient_groups", *(() if layers.pipeline is not None else ("microbatches",)))
    return TrainOptions(own_loss=own_loss, **{name: given[name] for name in names if name in given})
