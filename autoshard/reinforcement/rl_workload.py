"""The work of a step of reinforcement learning: samples, passes over them, and updates."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.program import read_config
from autoshard.serving import Decoder, config_decoder


@dataclasses.dataclass(frozen=True, slots=True)
class RlWorkload:
    """A step: sampled sequences, passes over them, and the updates of the policy."""

    sequences: int
    """Answers that are sampled in a step, over all prompts."""
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer, on the mean."""
    longest: int
    """Tokens of the longest answer."""
    answers: int = 1
    """Answers of each prompt."""
    updates: int = 1
    """Updates of the policy, each on an equal part of the sequences."""
    scores: int = 1
    """Forward passes of the trainer over all sequences: for old log-probabilities, and for those of a reference."""
    references: int = 0
    """Models with frozen weights in the trainer's memory: 1 with a reference, else 0."""
    staleness: int = 0
    """Updates of weights by which samples may be older than those that they train."""
    weights: str = "bf16"
    """Dtype of the sampler's weights, a key of `STORED_BYTES`."""
    cache: str = "bf16"
    """Dtype of keys and values."""
    framework: str = ""
    """Framework of the trainer on GPUs; empty for torchtitan, and for trainers that need none."""

    @property
    def length(self) -> int:
        """Tokens of a sequence on the mean: prompt and answer."""
        return self.prompt + self.answer

    @property
    def tokens(self) -> int:
        """Tokens of all sequences of a step."""
        return self.sequences * self.length

    def check(self) -> None:
        """Raise `UserError` for numbers that contradict one another."""
        if self.longest < self.answer:
            raise UserError(
                f"--longest {self.longest} is below the mean of --answer {self.answer}; give the longest answer."
            )
        if self.sequences % self.updates:
            raise UserError(f"--updates {self.updates} does not divide the {self.sequences} sequences of a step.")
        if self.sequences % self.answers:
            raise UserError(f"--answers {self.answers} does not divide the {self.sequences} sequences of a step.")


@dataclasses.dataclass(frozen=True, slots=True)
class RlModel:
    """The model that samples and is trained."""

    config: str
    """Its name as the user wrote it, `hf:CONFIG`."""
    decoder: Decoder
    fields: Mapping[str, Any]
    """Fields of its configuration."""


def rl_model(config: str, work: RlWorkload) -> RlModel:
    """Return the model `hf:CONFIG`.

    Raises `UserError` for a model that is no decoder of known form, and for answers beyond its positions.
    """
    if not config.startswith("hf:"):
        raise UserError(f"reinforcement learning is planned for a configuration, hf:CONFIG; found {config!r}.")
    decoder = config_decoder(config)
    if decoder is None:
        raise UserError(f"{config} is no decoder that can be counted; reinforcement learning is planned for decoders.")
    fields = read_config(config.removeprefix("hf:"))[1]
    positions = fields.get("max_position_embeddings") or fields.get("n_positions")
    longest = work.prompt + work.longest
    if positions and longest > positions:
        raise UserError(
            f"{config} has {positions} positions, and a prompt of {work.prompt} tokens with an answer of "
            f"{work.longest} needs {longest}; give a shorter --prompt or --longest."
        )
    return RlModel(config, decoder, fields)
