"""Training runs of decoders on GPUs as their sources state them: degrees, microbatches, ZeRO stage, recomputation."""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping

from autoshard.cost import Topology
from autoshard.errors import UserError


_FRAMEWORKS = pathlib.Path(__file__).with_name("frameworks.json")


@dataclasses.dataclass(frozen=True, slots=True)
class EagerFramework:
    """What a framework without a compiler runs beside matmuls, and keeps; `frameworks.json` says what is counted."""

    source: str
    attention: str
    """`flash`, or `scores`: scores of attention in memory."""
    gated: bool
    rotary: bool
    stages: str
    """How layers come to stages: `equal`, or `by parameters`, the head counted as layers."""
    sequence_parallel: bool
    """Whether norms and sums between tensor-parallel matmuls are split along the sequence."""
    gradient_bytes: int
    """Bytes of a gradient as it is summed over replicas."""
    accumulated: bool
    """Whether gradients of microbatches are added to a float32 buffer."""
    forward_bytes: Mapping[str, float]
    backward_bytes: Mapping[str, float]
    forward_ops: int
    """Ops that the host starts for a layer."""
    backward_ops: int
    forward_collectives: int
    backward_collectives: int
    kept_bytes: Mapping[str, float]
    """Bytes that a layer keeps for its backward pass; `gathered` are not split along the sequence."""
    bucket_bytes: int
    """16-bit gradients that are summed over replicas at a time; 0: all."""
    overlapped_sums: bool
    """Whether replicas that hold all state sum their gradients beside the last backward pass (torch DDP)."""
    gradient_copies: bool
    """Whether 16-bit gradients stay beside the float32 buffer where there are replicas."""


@functools.cache
def eager_framework(name: str) -> EagerFramework:
    """A framework of `frameworks.json`. Raises: UserError for another name."""
    known = json.loads(_FRAMEWORKS.read_text())
    known.pop("about")
    if name not in known:
        raise UserError(f"unknown framework {name!r}; known are {', '.join(known)}")
    return EagerFramework(**known[name])


@dataclasses.dataclass(frozen=True, slots=True)
class GpuDecoder:
    """Dims of a decoder as a row states them."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    gated: bool

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer's matmuls."""
        attention = self.width * (2 * self.width + 2 * self.kv_heads * self.head_dim)
        return attention + (3 if self.gated else 2) * self.width * self.ffn

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding, and as many of the head."""
        return self.vocab * self.width


@dataclasses.dataclass(frozen=True, slots=True)
class GpuRun:
    """One decoder trained under one stated plan."""

    decoder: GpuDecoder
    topology: Topology
    framework: str
    seq: int
    dp: int
    tp: int
    pp: int
    micro_batch: int
    """Sequences of a replica that pass at a time."""
    accumulation: int
    """Microbatches of a step and replica."""
    zero: int
    """0: replicas hold all; 1: optimizer state is split over them; 2: gradients too; 3: parameters too."""
    recompute: str
    """`none`, or `full`: layers keep their input alone."""
    chunks: int = 1
    """Parts of a stage in an interleaved schedule."""
    dtype: str = "bf16"
    reduced_bytes: int = 0
    """Bytes of a gradient as it is summed over replicas; 0: the framework's."""
    stated_batch: int = 0
    """Sequences of a step as the source has them; 0: it does not say."""

    def __post_init__(self) -> None:
        """Raises: UserError with the equation that does not hold."""
        if self.dp * self.tp * self.pp != self.topology.num_devices:
            raise UserError(
                f"dp {self.dp} x tp {self.tp} x pp {self.pp} = {self.dp * self.tp * self.pp}, but {self.topology.name} "
                f"has {self.topology.num_devices} GPUs"
            )
        if self.stated_batch and self.batch != self.stated_batch:
            raise UserError(
                f"dp {self.dp} x microbatch {self.micro_batch} x accumulation {self.accumulation} = {self.batch} "
                f"sequences, but a step has {self.stated_batch}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"ZeRO stage {self.zero} does not exist; stages are 0, 1, 2 and 3")
        if self.recompute not in ("none", "full"):
            raise UserError(f"recomputation {self.recompute!r} is not priced; known are none and full")

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.micro_batch * self.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    @property
    def eager(self) -> EagerFramework:
        return eager_framework(self.framework)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuStage:
    """What one stage of a pipeline holds."""

    layers: int
    embedding: bool
    head: bool


def gpu_stages(run: GpuRun) -> tuple[GpuStage, ...] | None:
    """The stages of a run; None where one would have nothing to do, which frameworks refuse.

    By parameters, blocks come in order, and the next stage begins after the block that passes its share of all
    parameters in matmuls: embedding, layers, norm, head, cast and loss.
    """
    decoder, pp = run.decoder, run.pp
    if run.eager.stages == "equal":
        if decoder.layers < pp:
            return None
        share, more = divmod(decoder.layers, pp)
        return tuple(GpuStage(share + (place < more), place == 0, place == pp - 1) for place in range(pp))
    blocks = [("embedding", 0)] + [("layer", decoder.layer_parameters)] * decoder.layers
    blocks += [("norm", 0), ("head", decoder.table_parameters), ("cast", 0), ("loss", 0)]
    whole = sum(cost for _, cost in blocks)
    found = [{"layer": 0, "embedding": 0, "head": 0, "norm": 0, "cast": 0, "loss": 0} for _ in range(pp)]
    place, done, last = 0, 0, 0
    for name, cost in blocks:
        if place >= pp:
            return None
        found[place][name] += 1
        last = place
        done += cost
        place += done * pp > whole * (place + 1)
    if last < pp - 1:
        return None
    return tuple(GpuStage(each["layer"], bool(each["embedding"]), bool(each["head"])) for each in found)


def waiting(run: GpuRun, place: int) -> int:
    """Microbatches whose activations a stage of a 1F1B pipeline holds at once."""
    return min(run.accumulation, run.pp - place)


def gpu_topology(chip: str, devices: int) -> Topology:
    """Whole islands of a chip. Raises: UserError where they do not divide."""
    from autoshard.cost import load_chip

    most = load_chip(chip).max_chips
    size = math.gcd(devices, most) if devices > most else devices
    return Topology.parse(f"{chip}:{size}" + (f"*{devices // size}" if devices > size else ""))
