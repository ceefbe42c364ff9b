"""The step that a first estimate is of, and the degrees by which devices split it."""

import dataclasses
import math

from autoshard.serving.decoder_counts import Decoder


REMATS = ("none", "dots", "full")
"""Remat policies that have an estimate."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepAsked:
    """The step whose memory and time are estimated."""

    batch: int
    """Number of sequences over all devices, of each microbatch if there are several."""
    seq: int
    """Tokens of a sequence; in a decoding step those in its cache."""
    kind: str = "train"
    """`train`, `infer` (a forward pass), `score`, `prefill` or `decode`.

    `score` is a forward pass with parameters split as in training, as for log-probabilities of samples.
    """
    remat: str = "none"
    """The policy of recomputation in training, one of `REMATS`."""
    param_bytes: float = 4
    """Bytes of one stored parameter."""
    state_bytes: float = 4
    """Bytes of each of an optimizer's two moments of a parameter."""
    multiplied: str = "bf16"
    """Dtype of the layers' matmuls; embedding and head have at least 16 bits."""
    cache_bytes: float = 2
    """Bytes of each element of the key-value cache."""
    chunk: int = 0
    """Tokens of prompts that a decoding step also computes, over the whole batch."""
    prompt: int = 1
    """Tokens of a prompt of which `chunk` is a part."""
    room: int = 0
    """Tokens of each sequence for which the cache has room; `seq` if that is more."""
    microbatches: int = 1
    """Number of microbatches of a training step or of scoring; gradients of a step are summed before the update."""
    candidates: int = 0
    """Logits of each sequence that a device sends to select the next token; 0 if none are selected."""
    rounds: int = 0
    """Sums over the vocabulary, one after the other, that the search for the most likely tokens takes."""

    @property
    def shards_weights(self) -> bool:
        """True if all devices split the parameters, which are gathered layer by layer."""
        return self.kind in ("train", "score")

    @property
    def training(self) -> bool:
        """True if there is a backward pass and an update."""
        return self.kind == "train"

    @property
    def tokens(self) -> int:
        """Number of tokens that the step computes on all devices; a decoding step has one for each sequence."""
        return self.batch + self.chunk if self.kind == "decode" else self.batch * self.seq


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The degrees by which devices split a step. The step has `data * model` devices."""

    data: int
    """Number of copies of the model, each with its part of the batch."""
    model: int
    """Number of devices that share one copy."""
    groups: int = 1
    """Number of groups of a copy's devices in attention, each with part of the batch and all attention weights."""
    experts: int | None = None
    """Number of parts of whole experts; the devices of a part split its experts. None: the most that divides both."""

    @property
    def heads(self) -> int:
        """Number of devices that split the heads of attention."""
        return self.model // self.groups

    def expert_parts(self, decoder: Decoder) -> int:
        """Return `experts`, or by default the greatest common divisor of the copy's devices and the experts."""
        return math.gcd(self.model, decoder.experts) if self.experts is None else self.experts
