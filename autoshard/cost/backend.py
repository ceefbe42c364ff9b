"""Traits of a backend: the machines that one of XLA's compilers targets, and the programs that it emits.

Every decision that depends on a backend's name stands here. Differences between chips of one backend stand in their
files (`chips/`), and measured figures in `calibration.json`.
"""

import dataclasses
import enum


class Scatters(enum.Enum):
    """Cases in which a partial sum that ends split becomes a reduce-scatter; otherwise it is all-reduced and sliced."""

    NEVER = "never"
    ALWAYS = "always"
    BY_GROUP = "by group"
    """The devices of the group decide, see `Collectives.partial_to_split_kind`."""


class Sorting(enum.Enum):
    """Algorithms that sort arrays, see `Compute.sort_seconds`."""

    BITONIC = "bitonic"
    RADIX = "radix"
    COMPARISON = "comparison"


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """Traits of one backend that prices, the planner and the execution of plans depend on."""

    name: str
    """`tpu`, `gpu` or `cpu`, as chip files write it."""
    platform: str
    """XLA's name of the platform that programs are lowered for."""
    noun: str
    """Words for the units that the numbers of a shape count."""

    # The machine.
    torus: bool
    """True if chips form a torus: a shape has dims, and devices have coordinates in it."""
    shares_machine: bool
    """True if devices are threads that share one machine's cores, memory and bandwidth. There is only one slice."""
    overlaps: bool
    """True if collectives can overlap with compute. Threads that wait for one another cannot compute."""
    in_turn: bool
    """True if the devices of a collective arrive one after the other, so that each device delays its launch."""

    # Collectives, as the compiler emits them and the runtime runs them.
    sums_in_two_phases: bool
    """True if an all-reduce is a reduce-scatter and an all-gather around a ring; else each device sums all parts."""
    sum_dtype: str
    """The dtype to which 16-bit floats are cast before a sum; empty if they are summed in their own dtype."""
    scatters: Scatters
    """Cases in which the compiler emits a reduce-scatter."""
    stages: bool
    """True if a sum or gather over several mesh axes can run one axis at a time, where that is faster."""
    joins_sums: bool
    """True if sums over several axes become one all-reduce, and gathers of several dims one all-gather."""
    sums_after_loops: bool
    """True if a sum that a loop only adds to a carried value runs once, after the loop."""
    adds_before_sums: bool
    """True if partial sums that are only added to each other are added first, and summed over devices once."""
    selects_in_rows: bool
    """True if the partitioner splits a top-k along its rows."""
    one_ring: bool
    """True if a collective over two levels of links runs around one ring through both, in many small parts."""

    # Compute.
    packs_blocks: bool
    """True if matmuls pack operands and loop around a block of registers; else tiles stream through a matrix unit."""
    caches: bool
    """True if caches prefetch and hold small blocks, so that a matmul costs a plain roofline."""
    burst_bytes: int
    """Least bytes that one access to main memory moves: 128 lanes of 4 bytes on TPUs, else a cache line."""
    sorting: Sorting
    """Algorithm that the compiler emits to sort arrays."""

    # Layouts of arrays, and programs, as the compiler emits them.
    tiled: bool
    """True if arrays lie in tiles of registers, which pad narrow arrays."""
    fuses_into_matmuls: bool
    """True if elementwise ops around a matmul, and a softmax between two matmuls, are fused into the matmul's loop."""
    fuses_relayouts: bool
    """True if a separate fusion lays out the shards of inner dims before or after a collective."""
    concatenates_shards: bool
    """True if a gather joins whole shards, so that shards of an inner dim are copied before and after it."""
    narrows_stacks: bool
    """True if a stack of layers is cast once, before the loop that casts its slices; both stacks then stay live."""
    gpu_kernels: bool
    """True if values are stored and copied by the rules of XLA's GPU kernels (`autoshard.graph.analyse`)."""
    launches: bool
    """True if the launch of every kernel takes time of its own."""
    rounds_operands: bool
    """True if matmuls of float32 at the default precision read operands that were rounded to bfloat16 before."""
    int8_to_floats: bool
    """True if matmuls of int8 may have results in floats; cuBLASLt has none."""
    late_gradients: bool
    """True if weight gradients that only the optimizer reads are computed after the loops that precede it."""
    results_apart: bool
    """True if no temporary value lies in the memory of a result before it is written."""
    one_in_flight: bool
    """True if a compiled program has one collective in flight at a time, over any of its links."""
    separate_collective_buffers: bool
    """True if results of collectives and operands of sums have memory of their own, and small collectives combine."""
    compiles_ahead: bool
    """True if programs compile with no device of that kind present (libtpu)."""
    described: bool
    """True if the compiler works with no device present when it is given a description of the chip."""
    judge: str
    """Default judge of plans: `measure` (the devices that are here) or `compile`."""
    serves_by_mesh: bool
    """True if vLLM runs one program over the mesh of an engine's devices; else it runs one process for each device. The
    program may split attention by groups of sequences.
    """
    attention: str
    """The kernel that computes attention where it may be chosen: `splash`, `cudnn`, or `plain` (scores in memory)."""

    @property
    def attention_kernel(self) -> str:
        """JAX's own function for the kernel `attention`, as users write it; empty if scores are in memory."""
        return _ATTENTION_KERNELS.get(self.attention, "")

    @property
    def compiles_without_devices(self) -> bool:
        """True if a compiler works with no device present, with or without a description of the chip."""
        return self.compiles_ahead or self.described


_ATTENTION_KERNELS = {
    "splash": "jax.experimental.pallas.ops.tpu.splash_attention",
    "cudnn": 'jax.nn.dot_product_attention(..., implementation="cudnn")',
}
"""JAX's own function for each kernel of attention."""

BACKENDS = {
    each.name: each
    for each in (
        Backend(
            name="tpu", platform="tpu", noun="chips of a slice",
            torus=True, shares_machine=False, overlaps=True, in_turn=False,
            sums_in_two_phases=True, sum_dtype="", scatters=Scatters.BY_GROUP, stages=True, joins_sums=True,
            sums_after_loops=True, adds_before_sums=True,
            selects_in_rows=True, one_ring=False, packs_blocks=False, caches=False, burst_bytes=512,
            sorting=Sorting.BITONIC, tiled=True, fuses_into_matmuls=True, fuses_relayouts=True,
            concatenates_shards=False,
            narrows_stacks=True, gpu_kernels=False,
            launches=True, rounds_operands=True, int8_to_floats=True, late_gradients=False, results_apart=True,
            one_in_flight=False, separate_collective_buffers=False,
            compiles_ahead=True, described=False, judge="compile",
            serves_by_mesh=True, attention="splash",
        ),
        Backend(
            name="gpu", platform="cuda", noun="GPUs in an island",
            torus=False, shares_machine=False, overlaps=True, in_turn=False,
            sums_in_two_phases=True, sum_dtype="", scatters=Scatters.ALWAYS, stages=False, joins_sums=False,
            sums_after_loops=True, adds_before_sums=True,
            selects_in_rows=True, one_ring=True, packs_blocks=False, caches=False, burst_bytes=64,
            sorting=Sorting.RADIX, tiled=False, fuses_into_matmuls=False, fuses_relayouts=False,
            concatenates_shards=False,
            narrows_stacks=False, gpu_kernels=True,
            launches=True, rounds_operands=False, int8_to_floats=False, late_gradients=True, results_apart=False,
            one_in_flight=True, separate_collective_buffers=True,
            compiles_ahead=False, described=True, judge="compile",
            serves_by_mesh=False, attention="cudnn",
        ),
        Backend(
            name="cpu", platform="cpu", noun="devices of one machine",
            torus=False, shares_machine=True, overlaps=False, in_turn=True,
            sums_in_two_phases=False, sum_dtype="f32", scatters=Scatters.NEVER, stages=False, joins_sums=False,
            sums_after_loops=False, adds_before_sums=False,
            selects_in_rows=False, one_ring=False, packs_blocks=True, caches=True, burst_bytes=64,
            sorting=Sorting.COMPARISON, tiled=False, fuses_into_matmuls=False, fuses_relayouts=False,
            concatenates_shards=True,
            narrows_stacks=True, gpu_kernels=False,
            launches=False, rounds_operands=False, int8_to_floats=False, late_gradients=False, results_apart=False,
            one_in_flight=False, separate_collective_buffers=False,
            compiles_ahead=False, described=False, judge="measure",
            serves_by_mesh=False, attention="plain",
        ),
    )
}  # fmt: skip
"""Every backend by its name."""
