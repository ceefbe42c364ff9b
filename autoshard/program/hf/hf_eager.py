"""Hugging Face models in eager torch, and the objective that they are trained on."""

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.program.hf.task_inputs import HfTask
from autoshard.program.jax import train_step
from autoshard.program.torch.eager_twin import EagerCall, EagerTwin, first_tensor, host_tensor, materialised


_SMALL = 20_000_000
"""Most parameters of a model that is compared in its full size."""

_LAYERS = re.compile(r"^(num_(hidden_)?layers|n_layers?|(encoder|decoder|text|vision)_layers|num_decoder_layers)$")
"""Names of fields that count layers."""
# Largest values of the fields in a reduced configuration.
_WIDTHS = {"hidden_size": 128, "d_model": 128, "n_embd": 128, "intermediate_size": 256, "d_ff": 256, "ffn_dim": 256}
_WIDTHS |= {"encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "n_inner": 256, "moe_intermediate_size": 64}
_WIDTHS |= {"num_attention_heads": 4, "n_head": 4, "num_heads": 4, "encoder_attention_heads": 4}
_WIDTHS |= {"decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "d_kv": 32}
_WIDTHS |= {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
_WIDTHS |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_WIDTHS |= {"vocab_size": 512, "num_experts_per_tok": 2, "query_pre_attn_scalar": 32, "embedding_size": 128}
_LAYER_COUNT = 4
"""Most layers of a reduced model."""


def eager_model(model: Any, seed: int) -> Any:
    """Return a module of transformers with random weights of a seed on the host, with eager attention and experts."""
    module = materialised(model, seed)
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is not None:
            config._attn_implementation = config._experts_implementation = "eager"
    return module


def hf_eager(
    model: Any, task: HfTask, training: bool, prepare: Callable[[Any], Any], retrace: Callable[[int], EagerTwin]
) -> EagerCall:
    """Return the functions with which transformers runs `model` with random weights on the host.

    A call returns the loss in training, else the logits, or all outputs of a model without logits. Attention and
    experts are transformers' eager ones.

    - `model`: the module on the meta device.
    - `task`: inputs of the model.
    - `training`: True to return the loss.
    - `prepare`: puts a model into the mode in which it is traced.
    - `retrace`: traces a reduced model with at most this many parameters, which is compared instead of a large one.
    """
    import numpy as np
    import torch

    def call(module: Any, batch: Mapping[str, Any]) -> Any:
        """Run the module on a batch of host arrays by name; return the loss, the logits or all outputs."""
        given = {key: host_tensor(value, torch.int64) for key, value in batch.items()}
        labels = given.pop("labels", None)
        arrays = {key: value for key, value in task.call(given).items() if isinstance(value, np.ndarray)}
        out = module(**task.call(given) | {key: torch.as_tensor(value) for key, value in arrays.items()})
        if training:
            return _loss(module, out, labels)
        return out["logits"] if isinstance(out, Mapping) and "logits" in out else out

    small = sum(parameter.numel() for parameter in model.parameters()) <= _SMALL
    return EagerCall(call, prepare, rebuild=functools.partial(eager_model, model), reduce=None if small else retrace)


def _loss(module: Any, out: Any, labels: Any) -> Any:
    """Compute the scalar loss that a step of the model minimises, as `Objective.of` chooses it.

    It is the cross entropy of logits with labels if both exist, else the model's own loss. Without one it is the
    mean of squares of the first output. Labels are compared with the logits of the same position, without a shift.
    """
    import torch

    logits = out.get("logits") if isinstance(out, Mapping) else None
    if logits is not None and labels is not None:
        classes = logits.shape[-1]
        if "Segmentation" in type(module).__name__ and logits.ndim == 4:
            logits, classes = logits.movedim(1, -1), logits.shape[1]
        return torch.nn.functional.cross_entropy(logits.float().reshape(-1, classes), labels.reshape(-1))
    own = out.get("loss") if isinstance(out, Mapping) else None
    return own.float() if own is not None else first_tensor(out).float().square().mean()


def reduced_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration with fewer layers, heads and experts, narrower widths and a smaller vocabulary.

    Nested configurations are reduced too. Fields below the limits are unchanged. Equal numbers of query and
    key-value heads stay equal. The ids of the common special tokens stay in the vocabulary. Lists of ids do not, and
    neither do ids in a mapping other than that of `vocab_size`.
    """
    reduced = copy.deepcopy(dict(fields))
    for key, value in fields.items():
        if isinstance(value, Mapping):
            reduced[key] = reduced_fields(value)
        elif isinstance(value, list) and key in ("layer_types", "mlp_layer_types"):
            reduced[key] = value[:_LAYER_COUNT]
        elif isinstance(value, int) and not isinstance(value, bool):
            if _LAYERS.match(key):
                reduced[key] = min(value, _LAYER_COUNT)
            elif key in _WIDTHS:
                reduced[key] = min(value, _WIDTHS[key])
    heads, few = reduced.get("num_attention_heads"), reduced.get("num_key_value_heads")
    if heads and few and fields.get("num_attention_heads") == fields.get("num_key_value_heads"):
        reduced["num_key_value_heads"] = heads
    if reduced.get("first_k_dense_replace"):
        reduced["first_k_dense_replace"] = 1
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "image_token_id"):
        if isinstance(reduced.get(key), int) and isinstance(reduced.get("vocab_size"), int):
            reduced[key] = min(reduced[key], reduced["vocab_size"] - 1)
    return reduced


def form_words(model: Any) -> str:
    """Describe a reduced model by the layers and the width of its text part, as in `4 layers of width 128, in float32`.

    The dtype is always `float32`: that of the model is not read. Without known fields the text is `fewer parameters,
    in float32`.
    """
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = [getattr(text, key) for key in ("num_hidden_layers", "num_layers", "n_layer") if hasattr(text, key)]
    widths = [getattr(text, key) for key in ("hidden_size", "d_model", "n_embd") if hasattr(text, key)]
    words = [*(f"{count} layers" for count in layers[:1]), *(f"of width {width}" for width in widths[:1])]
    return ", ".join([" ".join(words) or "fewer parameters", "in float32"])


def reduced_twin(program: Any, parameters: int) -> EagerTwin:
    """Return the twin of a reduced program, with its form in words.

    Raises `UserError` if it has more than `parameters` parameters.
    """
    twin = program.eager
    if twin.parameters > parameters:
        raise UserError("no smaller form of its configuration is known")
    forms = filter(None, (form_words(twin.function.module), twin.judged(parameters, math.inf).form))
    return dataclasses.replace(twin, form=", ".join(forms))


class OtherLabels(UserError):
    """Signal that a model needs labels of another shape, or none."""

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        """Store the shape of the labels; None if the model needs none."""
        super().__init__("the labels of this model have another shape.")
        self.shape = shape


class Objective:
    """The loss of a model, chosen by the shapes of its outputs.

    Outputs `logits` [..., classes] are compared with labels. A model that compares its inputs with one another has its
    own loss. For any other head the mean of squares of the first output is minimised, and a note says so.
    """

    def __init__(
        self, architecture: str, name: str, notes: list[str], headed: bool, unpadded: int | None = None
    ) -> None:
        """Store the names of class and model, the list of notes to extend, and whether the class is for a task.

        `unpadded` is the number of classes that count; None for all.
        """
        self.architecture, self.name, self.notes, self.headed = architecture, name, notes, headed
        self.unpadded = unpadded
        self.classes: int | None = None
        """Upper bound, exclusive, of the labels."""

    def of(self, out: Any, labels: Any) -> Any:
        """Return the scalar loss of the outputs `out`; `labels` is None without labels.

        It is the token loss of `logits` and labels if both exist, and the outputs' own `loss` if there are neither
        logits nor labels. Otherwise it is the mean of squares of the first floating output, also for logits without
        labels; a note says so once.

        Changes `classes` for a token loss only. Raises `OtherLabels` if the outputs need labels of another shape, or
        none. Raises `UserError` without logits, own loss and head, and without floating outputs.
        """
        import jax
        import jax.numpy as jnp

        outputs = out if isinstance(out, Mapping) else {}
        if "logits" in outputs and hasattr(outputs["logits"], "ndim"):
            logits = outputs["logits"]
            if "Segmentation" in self.architecture and logits.ndim == 4:
                logits = jnp.moveaxis(logits, 1, -1)
            if labels is None or logits.shape[:-1] == labels.shape:
                if labels is not None:
                    if self.unpadded is not None:
                        logits = train_step.without_padding(logits, self.unpadded)
                    self.classes = self.unpadded or int(logits.shape[-1])
                    return train_step.token_loss(logits, labels)
            elif logits.shape != labels.shape and logits.ndim > 1:
                raise OtherLabels(tuple(logits.shape[:-1]))
        elif outputs.get("loss") is not None and outputs["loss"].ndim == 0:
            if labels is not None:
                raise OtherLabels(None)
            return outputs["loss"].astype(jnp.float32)
        elif not self.headed:
            raise UserError(
                f"`{self.name}` has no `logits` to train on; name an architecture with a head in the configuration."
            )
        if labels is not None:
            raise OtherLabels(None)
        leaves = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        if not leaves:
            raise UserError(
                f"`{self.name}` gives no output of floats to train on; plan its inference: leave --train out."
            )
        what = "the step minimises the mean of squares of its first output."
        text = f"No labels are known for `{self.architecture}`: {what}"
        if text not in self.notes:
            self.notes.append(text)
        return jnp.mean(jnp.square(leaves[0].astype(jnp.float32)))
