"""The output head of a model of transformers, apart from the model, so that its loss is computed by chunks."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.program.jax.chunked_loss import LossChunks, chunked_cross_entropy
from autoshard.program.jax.train_step import without_padding
from autoshard.program.model_flops import record_matmul


@dataclasses.dataclass(slots=True)
class HeadApart:
    """A head that returned its input in the model's last call."""

    head: Any
    name: str
    """Name of the model in errors."""
    input: Any = None
    """Input of the head in the last call, a torch tensor that wraps a JAX array; None before it."""

    def loss(
        self,
        out: Any,
        params: Mapping[str, Any],
        names: Mapping[int, str],
        labels: Any,
        by: LossChunks,
        classes: int | None = None,
    ) -> Any:
        """Return the loss of the model's outputs `out`, whose `logits` are the head's input.

        - `params`: arrays of the parameters by name; `names`: their names by `id` of the torch parameter.
        - `labels`: [B, S]; `by`: numbers of chunks; `classes`: the classes that count, None for all.

        Raises `UserError` if the model computes its logits from more than the head, and for chunks that do not divide.
        """
        import jax.numpy as jnp

        logits = out.get("logits") if isinstance(out, Mapping) else None
        own = getattr(self.input, "_elem", None)
        if own is None or logits is not own or labels is None:
            raise UserError(
                f"--loss-chunks: the logits of `{self.name}` are not those of its head alone; leave it out."
            )
        if own.ndim != 3 or labels.shape != own.shape[:2]:
            raise UserError(f"--loss-chunks: `{self.name}` has no label for each token; leave it out.")
        weights = params[names[id(self.head.weight)]]
        bias = None if self.head.bias is None else params[names[id(self.head.bias)]]
        if classes is not None:
            bias = without_padding(jnp.zeros(weights.shape[0]) if bias is None else bias, classes)
        record_matmul((*labels.shape, weights.shape[0]), weights.shape[1])
        return chunked_cross_entropy(logits, weights, labels, tokens=by.tokens, vocabulary=by.vocabulary, bias=bias)


def head_of(model: Any, name: str) -> HeadApart:
    """Return the output head of a model; raise `UserError` if it has no linear one."""
    import torch

    named = getattr(model, "get_output_embeddings", None)
    head = None if named is None else named()
    if type(head) is not torch.nn.Linear:
        raise UserError(f"--loss-chunks: `{name}` has no linear output head of tokens; leave it out.")
    return HeadApart(head, name)


@contextlib.contextmanager
def head_left_out(apart: HeadApart) -> Iterator[None]:
    """Let the head return its input for the duration, and record it."""

    def forward(x: Any) -> Any:
        apart.input = x
        return x

    apart.head.forward = forward
    try:
        yield
    finally:
        del apart.head.forward
