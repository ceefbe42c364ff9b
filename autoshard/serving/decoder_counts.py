"""Closed-form counts of a decoder-only transformer: parameters, FLOPs, cache and saved activations.

A planned program is counted op by op. These counts serve checks against published figures, which name a model by its
dims alone.
"""

import dataclasses
from collections.abc import Iterable

from autoshard.errors import UserError
from autoshard.program import DecoderDims


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder(DecoderDims):
    """Dims of a decoder, and the counts that follow from them."""

    @property
    def attention_params(self) -> int:
        """Number of weights of the projections of one layer's attention: queries, keys, values and output."""
        if self.latent is not None:
            own, heads = self.latent, self.heads
            query_inputs = own.query_rank or self.width
            query = (self.width * own.query_rank if own.query_rank else 0) + query_inputs * heads * own.head_size
            keys = self.width * (own.key_rank + own.rope_size) + own.key_rank * heads * (own.nope_size + own.value)
            return query + keys + heads * own.value * self.width
        return self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_params(self) -> int:
        """Number of weights of one dense MLP: three matrices if gated, else two."""
        return (3 if self.gated else 2) * self.width * self.mlp_width

    @property
    def expert_params(self) -> int:
        """Number of weights of one expert: three matrices if gated, else two."""
        return (3 if self.gated else 2) * self.width * self.expert_inner

    @property
    def dense_layer_params(self) -> int:
        """Number of weights of the matmuls of one layer that has a single MLP: attention and MLP, no norms."""
        return self.attention_params + self.mlp_params

    @property
    def table_params(self) -> int:
        """Number of weights of the embedding alone; the head has as many."""
        return self.vocabulary * self.width

    def _layer_params(self, experts: int, norms: int) -> int:
        """Return the number of parameters of all layers, those for multi-token prediction (`ahead`) included.

        - `experts`: number of routed experts to count in each layer that has experts; routers and shared experts are
          counted in full.
        - `norms`: number of norm parameters to count in each layer.
        """
        router = self.width * self.experts
        sparse = self.mlp_params if self.experts == 1 else (experts + self.shared_experts) * self.expert_params + router
        mlps = self.dense_layers * self.mlp_params + (self.layers + self.ahead - self.dense_layers) * sparse
        joined = self.ahead * 2 * self.width**2
        return (self.layers + self.ahead) * (self.attention_params + norms) + mlps + joined

    @property
    def params(self) -> int:
        """Number of all parameters; norms count one vector each, biases none. Tied embedding and head count once."""
        norms = 2 * self.width + (2 * self.head_size if self.qk_norm else 0)
        if self.latent is not None:
            norms = 2 * self.width + self.latent.query_rank + self.latent.key_rank
        ends = (1 if self.tied else 2) * self.table_params + (1 + 2 * self.ahead) * self.width
        return self._layer_params(self.experts, norms) + ends

    @property
    def matmul_params(self) -> int:
        """Number of parameters that multiply each token: active experts and head, but no embedding lookup or norms.

        The head counts again for each layer ahead.
        """
        return self._layer_params(self.active_experts, 0) + (1 + self.ahead) * self.table_params

    def attention_flops_per_token(self, sequence: float, causal: bool = True) -> float:
        """Return the forward FLOPs of scores and weighted sums for one token of a sequence, in all layers.

        `sequence` is its length in tokens; causal attention has half. A layer with a window of w computes the scores
        of w tokens; causality halves those of the first w rows. One in `global_every` layers has no window.
        """
        sizes = 2 * self.head_size if self.latent is None else self.latent.head_size + self.latent.value
        full, layers = 2.0 * sequence * self.heads * sizes * (0.5 if causal else 1.0), self.layers + self.ahead
        if self.window is None or self.window >= sequence:
            return full * layers
        seen = self.window / sequence * (2.0 - self.window / sequence if causal else 1.0)
        return full * layers * (1.0 + (self.global_every - 1) * seen) / self.global_every

    def train_flops(self, tokens: float, sequence: float = 0, causal: bool = True) -> float:
        """Return a training step's model FLOPs: 6 per matmul parameter and token, and three times forward attention.

        `tokens` are those of the whole batch. A `sequence` of 0 tokens, the default, counts no attention.
        """
        return tokens * (6.0 * self.matmul_params + 3.0 * self.attention_flops_per_token(sequence, causal))

    def forward_flops(self, tokens: float, sequence: float = 0, causal: bool = True) -> float:
        """Return the model FLOPs of one forward pass: 2 per matmul parameter and token, and attention.

        Arguments are those of `train_flops`.
        """
        return tokens * (2.0 * self.matmul_params + self.attention_flops_per_token(sequence, causal))

    def kv_bytes(self, tokens: float, itemsize: float = 2) -> float:
        """Return the bytes of the key/value cache of `tokens` tokens, or of the latent vectors cached instead.

        `itemsize` is the bytes of an element. Layers ahead have no cache, and windows do not shorten it.
        """
        if self.latent is not None:
            return tokens * self.layers * (self.latent.key_rank + self.latent.rope_size) * itemsize
        return 2.0 * tokens * self.layers * self.kv_heads * self.head_size * itemsize

    def activation_widths(self) -> dict[str, int]:
        """Return the elements per token of every intermediate tensor of one layer, by name, in order of computation.

        The MLP is the dense one, whose `gate` exists only if gated. Latent attention has full keys for every head.
        """
        widths = {
            "input": self.width,
            "normed": self.width,
            "query": self.heads * self.head_size,
            "key": self.kv_heads * self.head_size,
            "value": self.kv_heads * self.head_size,
            "attention": self.heads * self.head_size,
            "residual": self.width,
            "mlp_normed": self.width,
            "gate": self.mlp_width,
            "up": self.mlp_width,
            "product": self.mlp_width,
        }
        if self.latent is not None:
            query, value = self.heads * self.latent.head_size, self.heads * self.latent.value
            widths |= {"query": query, "key": query, "value": value, "attention": value}
        if not self.gated:
            del widths["gate"]
        return widths

    def saved_bytes(self, tokens: float, names: Iterable[str] | None = None, itemsize: float = 2) -> float:
        """Return the bytes of the named intermediates of all layers for the backward pass (None: all of them).

        `tokens` are those of the batch, `itemsize` the bytes of an element. Layers ahead are not counted. Raises
        `UserError` for a name that is not in `activation_widths`.
        """
        widths = self.activation_widths()
        chosen = list(widths) if names is None else list(names)
        unknown = [name for name in chosen if name not in widths]
        if unknown:
            raise UserError(f"a decoder layer has no intermediate {unknown[0]!r}; it has {', '.join(widths)}")
        return tokens * self.layers * itemsize * sum(widths[name] for name in chosen)


def train_state_bytes(params: float, param_itemsize: float = 2, moment_itemsize: float = 4) -> float:
    """Return the bytes of `params` parameters and of Adam's two moments of each; itemsizes are bytes of an element."""
    return params * (param_itemsize + 2 * moment_itemsize)
