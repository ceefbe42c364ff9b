"""Training runs of decoders on GPUs as their sources state them: degrees, microbatches, ZeRO stage, recomputation."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.serving import Decoder


RECOMPUTES = ("none", "selective", "matmuls", "full")
"""Values of `GpuRun.recompute`."""
_FRAMEWORKS = pathlib.Path(__file__).with_name("frameworks.json")


@dataclasses.dataclass(frozen=True, slots=True)
class EagerFramework:
    """Work of a framework without a compiler in addition to matmuls, and its saved tensors (`frameworks.json`)."""

    source: str
    """Publication or code that the figures are of."""
    attention: str
    """Attention: `flash`, or `scores` with the scores in memory."""
    stages: str
    """Division of layers into stages: `equal`, or `by parameters`, with the head counted as layers."""
    sequence_parallel: bool
    """True if norms and sums between tensor-parallel matmuls are split along the sequence."""
    overlapped_scatters: bool
    """True if the gradient of a layer's input is scattered over `tp` during the matmul of the weights' gradient."""
    gradient_bytes: int
    """Bytes of one element of a gradient when it is summed over replicas."""
    accumulated: bool
    """True if gradients of microbatches are added to a float32 buffer."""
    forward_bytes: Mapping[str, float]
    """Bytes that kernels other than matmuls move in the forward pass, for each element of a kind of tensor.

    Kinds: `hidden` (tokens x width), `ffn` (tokens x MLP width), `rotary` (tokens x width), `scores`, `logits`.
    """
    backward_bytes: Mapping[str, float]
    """Bytes of the backward pass, counted alike."""
    forward_ops: int
    """Ops that the host launches for a layer's forward pass."""
    backward_ops: int
    """Number of ops of the backward pass, counted alike."""
    forward_collectives: int
    """Tensor-parallel collectives that the host launches for a layer's forward pass."""
    backward_collectives: int
    """Number of collectives of the backward pass, counted alike."""
    dtensor_ops: float
    """Share of a layer's ops that take DTensors if `tp` is above 1."""
    gathered_logit_bytes: int
    """Bytes of a logit when logits are gathered over `tp` for a loss on all of them; 0 for a loss on split logits."""
    kept_bytes: Mapping[str, float]
    """Bytes that a layer saves for its backward pass, for each element of a kind of tensor.

    Kinds are those of `forward_bytes`, and `gathered` (tokens x width), which is not split along the sequence.
    """
    bucket_bytes: int
    """Bytes of 16-bit gradients that are summed over replicas at a time; 0 for all."""
    overlapped_sums: bool
    """True if replicas with all state overlap the sums of gradients with the last backward pass (torch DDP)."""
    overlapped_state: bool
    """True if ZeRO stage 1 overlaps its sums with backward passes, and its gathers with forward passes."""
    narrow_inputs: bool
    """True if inputs of matmuls in 8 bits are saved in 8 bits (Transformer Engine), False if as they were before."""
    gradient_copies: bool
    """True if 16-bit gradients stay allocated next to the float32 buffer when there are replicas."""


@functools.cache
def eager_framework(name: str) -> EagerFramework:
    """Return a framework of `frameworks.json`. Raises: UserError for another name."""
    known = json.loads(_FRAMEWORKS.read_text())
    known.pop("about")
    if name not in known:
        raise UserError(f"unknown framework {name!r}; known are {', '.join(known)}")
    entry = known[name]
    while "like" in entry:
        entry = known[entry.pop("like")] | entry
    return EagerFramework(**entry)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuRun:
    """One decoder trained under one stated plan."""

    decoder: Decoder
    topology: Topology
    framework: str
    """Name of an `EagerFramework`."""
    seq: int
    """Tokens of one sequence."""
    dp: int
    """Replicas; `tp` and `pp` are the GPUs of a tensor-parallel group and the stages of a pipeline."""
    tp: int
    pp: int
    micro_batch: int
    """Sequences of one replica's microbatch."""
    accumulation: int
    """Microbatches of one replica in a step."""
    zero: int
    """ZeRO stage, the state split over replicas. 0: none; 1: optimizer state; 2: gradients too; 3: parameters too."""
    recompute: str
    """`none`, or the policy of layers, which save their input, and only with two policies further values.

    `selective` is torchtitan's policy by op (`SelectiveSaves`). `matmuls` saves the results of all but the last matmul.
    """
    chunks: int = 1
    """Chunks of layers in a stage of an interleaved schedule."""
    dtype: str = "bf16"
    """dtype of a layer's matmuls; with `fp8` those of the head and of attention have 16 bits."""
    reduced_bytes: int = 0
    """Bytes of one element of a gradient when it is summed over replicas; 0 for the framework's."""
    stated_batch: int = 0
    """Sequences of a step according to the source; 0 if the source does not state it."""
    ep: int = 1
    """GPUs that divide a layer's experts, of the `dp * tp` of a stage; tokens are sent to them and back."""
    cp: int = 1
    """GPUs that divide a sequence (context parallelism), each with equally many scores."""
    async_tp: bool = False
    """True if gathers and scatters over `tp` run in parts that overlap with their matmuls (asynchronous TP)."""
    copies: int = 1
    """Groups of replicas that each divide all state by ZeRO stage 3, and sum gradients with the others (HSDP)."""
    inner_copies: bool = False
    """True if replicas with the same part of the state are next to each other, False if those of one group are."""
    adapter_rank: int = 0
    """Rank of adapters (LoRA) of attention's projections, which alone are trained; 0 without adapters."""

    def __post_init__(self) -> None:
        """Check degrees, stated batch, ZeRO stage and recomputation. Raises: UserError for the first that is wrong."""
        product = self.replicas * self.tp * self.pp
        if product != self.topology.num_devices:
            context = f" x cp {self.cp}" if self.cp > 1 else ""
            raise UserError(
                f"dp {self.dp} x tp {self.tp} x pp {self.pp}{context} = {product}, but {self.topology.name} "
                f"has {self.topology.num_devices} GPUs"
            )
        if self.stated_batch and self.batch != self.stated_batch:
            raise UserError(
                f"dp {self.dp} x microbatch {self.micro_batch} x accumulation {self.accumulation} = {self.batch} "
                f"sequences, but a step has {self.stated_batch}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"ZeRO stage {self.zero} does not exist; stages are 0, 1, 2 and 3")
        if self.recompute not in RECOMPUTES:
            raise UserError(f"recomputation {self.recompute!r} is not priced; known are {', '.join(RECOMPUTES)}")
        if self.replicas % self.copies or self.copies > 1 and self.zero != 3:
            raise UserError(f"{self.copies} copies of the state do not divide {self.replicas} replicas of ZeRO stage 3")
        if self.replicas * self.tp % self.ep:
            raise UserError(f"ep {self.ep} does not divide dp {self.dp} x tp {self.tp}")
        if self.decoder.experts % self.ep:
            raise UserError(f"ep {self.ep} does not divide the {self.decoder.experts} experts")

    @property
    def replicas(self) -> int:
        """GPUs with copies of the same parameters before ZeRO divides them: those of `dp` and `cp`."""
        return self.dp * self.cp

    @property
    def adapter_params(self) -> int:
        """Weights of the adapters of one layer: of queries with keys and values, and of the output."""
        decoder = self.decoder
        queries, keys = decoder.heads * decoder.head_size, decoder.kv_heads * decoder.head_size
        return self.adapter_rank * (2 * decoder.width + 2 * queries + 2 * keys)

    @property
    def micro_tokens(self) -> float:
        """Tokens of a microbatch on one GPU."""
        return self.micro_batch * self.seq / self.cp

    @property
    def batch(self) -> int:
        """Sequences of a step over all replicas."""
        return self.dp * self.micro_batch * self.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of a step over all replicas."""
        return self.batch * self.seq

    @property
    def expert_replicas(self) -> int:
        """GPUs of a stage that hold the same experts before ZeRO divides them."""
        return self.replicas * self.tp // self.ep

    def split_parameters(self, layers: float, tables: float = 0) -> tuple[tuple[float, int], ...]:
        """Return parameters that one GPU holds before ZeRO, with the number of its replicas: dense ones, then experts.

        Adapters are the only ones that are trained, and are not split.

        - `layers`, `tables`: number of layers and of tables (embedding, head) to count.
        """
        decoder, replicas = self.decoder, self.replicas // self.copies
        if self.adapter_rank:
            return ((layers * self.adapter_params, replicas),)
        if decoder.experts == 1:
            return (((layers * decoder.dense_layer_params + tables * decoder.table_params) / self.tp, replicas),)
        router = decoder.width * decoder.experts
        dense = (layers * decoder.attention_params + tables * decoder.table_params) / self.tp + layers * router
        experts = layers * decoder.experts * decoder.expert_params / self.ep
        return ((dense, replicas), (experts, self.expert_replicas))

    @property
    def eager(self) -> EagerFramework:
        """The run's framework. Raises: UserError for an unknown name."""
        return eager_framework(self.framework)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuStage:
    """Blocks of a decoder on one stage of a pipeline."""

    layers: int
    """Number of layers."""
    embedding: bool
    """True if the stage has the table of tokens."""
    head: bool
    """True if the stage has the head and the loss."""


def gpu_stages(run: GpuRun) -> tuple[GpuStage, ...] | None:
    """Return the stages of a run; None if a stage would have no work, which frameworks refuse.

    Equal stages differ by at most one layer, and the first ones have more. The first stage has the embedding, the last
    one the head. With stages by parameters, the next stage begins after the block that passes its share of all
    parameters in matmuls. Blocks are in the order embedding, layers, norm, head, cast and loss.
    """
    decoder, pp = run.decoder, run.pp
    if run.eager.stages == "equal":
        if decoder.layers < pp:
            return None
        share, more = divmod(decoder.layers, pp)
        return tuple(GpuStage(share + (place < more), place == 0, place == pp - 1) for place in range(pp))
    blocks = [("embedding", 0)] + [("layer", decoder.dense_layer_params)] * decoder.layers
    blocks += [("norm", 0), ("head", decoder.table_params), ("cast", 0), ("loss", 0)]
    total = sum(cost for _, cost in blocks)
    counts = [{"layer": 0, "embedding": 0, "head": 0, "norm": 0, "cast": 0, "loss": 0} for _ in range(pp)]
    place, done, last = 0, 0, 0
    for name, cost in blocks:
        if place >= pp:
            return None
        counts[place][name] += 1
        last = place
        done += cost
        place += done * pp > total * (place + 1)
    if last < pp - 1:
        return None
    return tuple(GpuStage(each["layer"], bool(each["embedding"]), bool(each["head"])) for each in counts)


def waiting(run: GpuRun, place: int) -> int:
    """Return the number of microbatches whose activations a stage of a 1F1B pipeline stores at once.

    `place` is the number of the stage from 0: the first stage stores most.
    """
    return min(run.accumulation, run.pp - place)


def gpu_topology(chip: str, devices: int) -> Topology:
    """Return a topology of a chip with that many devices: one island if they fit, else equal islands.

    The islands are the largest of the chip's that divide `devices`: 512 of gb200 are 8 racks with 64 of 72 GPUs each.
    """
    from autoshard.cost import load_chip

    found = load_chip(chip)
    whole = [size for (size,) in found.small_shapes if devices % size == 0]
    size = max(whole) if devices > found.max_chips else devices
    return Topology.parse(f"{chip}:{size}" + (f"*{devices // size}" if devices > size else ""))
