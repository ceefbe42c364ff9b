"""What sets backends apart: the machines that one of XLA's compilers makes programs for, and what that compiler emits.

All that is told apart by a backend's name is told apart here. What differs between chips of one backend stands in their
files (`chips/`), what was measured of them in `calibration.json`.
"""

import dataclasses
import enum


class Scatters(enum.Enum):
    """When a partial result that ends split becomes a reduce-scatter; else it is summed whole and sliced."""

    NEVER = "never"
    ALWAYS = "always"
    BY_GROUP = "by group"
    """It depends on which devices take part, see `Collectives.partial_to_split_kind`."""


class Sorting(enum.Enum):
    """How arrays are sorted, see `Compute.sort_seconds`."""

    BITONIC = "bitonic"
    RADIX = "radix"
    COMPARISON = "comparison"


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """One backend, as prices, the planner and what runs plans ask about it."""

    name: str
    """`tpu`, `gpu` or `cpu`, as chip files write it."""
    platform: str
    """XLA's name of the platform that programs are lowered for."""
    noun: str
    """What the numbers of a shape count, as people say it."""

    # The machine.
    torus: bool
    """Whether chips stand in a torus, so that a shape has dims, and devices have coordinates in it."""
    shares_machine: bool
    """Whether devices are threads of one machine, which share its cores, memory and bandwidth: there is one slice."""
    overlaps: bool
    """Whether collectives can run beside compute; threads that wait for one another cannot compute."""
    in_turn: bool
    """Whether the devices of a collective arrive one after the other, so that its start takes longer with each."""

    # Collectives, as the compiler emits them and the runtime runs them.
    sums_in_two_phases: bool
    """Whether an all-reduce is a reduce-scatter and an all-gather around a ring; else each device sums all parts."""
    sum_dtype: str
    """The dtype that 16-bit floats are turned into to be summed; empty where they are summed as they are."""
    scatters: Scatters
    stages: bool
    """Whether a sum or gather over several mesh axes can be had one axis at a time, where that is better."""
    joins_sums: bool
    """Whether sums over several axes become one all-reduce, and gathers of several dims one all-gather."""
    one_ring: bool
    """Whether a collective over two levels of links runs around one ring through both, in many small parts."""

    # Compute.
    packs_blocks: bool
    """Whether matmuls pack their operands and loop around a block of registers; else tiles stream through a unit."""
    caches: bool
    """Whether caches load ahead and hold small blocks, so that a matmul costs a plain roofline."""
    burst_bytes: int
    """Least bytes that one access to main memory moves: 128 lanes of 4 bytes on TPUs, else a cache line."""
    sorting: Sorting

    # What the compiler makes of arrays and of the program.
    tiled: bool
    """Whether arrays lie in tiles of registers, which pad narrow ones."""
    fuses_into_matmuls: bool
    """Whether what is computed light around a matmul is computed in its loop, and a softmax between two of them."""
    relays_shards: bool
    """Whether shards of inner dims are put in place by a fusion of their own before or after a collective."""
    copies_shards: bool
    """Whether a gather joins whole shards, so that those of an inner dim are copied before and after it."""
    narrows_stacks: bool
    """Whether a stack of layers is converted once before the loop that narrows slices of it, and held beside it."""
    gpu_kernels: bool
    """True where values are stored and copied by the rules of XLA's GPU kernels (`autoshard.graph.analyse`)."""
    launches: bool
    """True where the start of every kernel takes time of its own."""
    rounds_operands: bool
    """Whether matmuls of float32 at the default precision take operands that are rounded to bfloat16 beforehand."""
    late_gradients: bool
    """Whether gradients of weights that the optimizer alone takes are made after the loops that stand before it."""
    holds_in_flight: bool
    """Whether what collectives bring, and what they sum, has memory of its own, and small ones are joined."""
    compiles_ahead: bool
    """Whether programs are compiled with no device of that kind present (libtpu)."""
    described: bool
    """Whether a description of the chip stands for the chip where its compiler works with no device present."""
    judge: str
    """Who judges plans unless asked otherwise: `measure`, the devices that are here, or `compile`."""
    serves_by_mesh: bool
    """Whether vLLM runs one program over a mesh of an engine's devices there, and may split attention by groups of
    sequences in it; else it runs a process for each device."""
    attention: str
    """The kernel that computes attention where it may be chosen: `splash`, `cudnn`, or `plain`, scores in memory."""

    @property
    def compiles_without_devices(self) -> bool:
        """Whether there is a compiler that works with no device present, with or without a description of the chip."""
        return self.compiles_ahead or self.described


BACKENDS = {
    each.name: each
    for each in (
        Backend(
            name="tpu", platform="tpu", noun="chips of a slice",
            torus=True, shares_machine=False, overlaps=True, in_turn=False,
            sums_in_two_phases=True, sum_dtype="", scatters=Scatters.BY_GROUP, stages=True, joins_sums=True,
            one_ring=False, packs_blocks=False, caches=False, burst_bytes=512, sorting=Sorting.BITONIC,
            tiled=True, fuses_into_matmuls=True, relays_shards=True, copies_shards=False,
            narrows_stacks=True, gpu_kernels=False,
            launches=True, rounds_operands=True, late_gradients=False, holds_in_flight=False,
            compiles_ahead=True, described=False, judge="compile",
            serves_by_mesh=True, attention="splash",
        ),
        Backend(
            name="gpu", platform="cuda", noun="GPUs in an island",
            torus=False, shares_machine=False, overlaps=True, in_turn=False,
            sums_in_two_phases=True, sum_dtype="", scatters=Scatters.ALWAYS, stages=False, joins_sums=False,
            one_ring=True, packs_blocks=False, caches=False, burst_bytes=64, sorting=Sorting.RADIX,
            tiled=False, fuses_into_matmuls=False, relays_shards=False, copies_shards=False,
            narrows_stacks=False, gpu_kernels=True,
            launches=True, rounds_operands=False, late_gradients=True, holds_in_flight=True,
            compiles_ahead=False, described=True, judge="compile",
            serves_by_mesh=False, attention="cudnn",
        ),
        Backend(
            name="cpu", platform="cpu", noun="devices of one machine",
            torus=False, shares_machine=True, overlaps=False, in_turn=True,
            sums_in_two_phases=False, sum_dtype="f32", scatters=Scatters.NEVER, stages=False, joins_sums=False,
            one_ring=False, packs_blocks=True, caches=True, burst_bytes=64, sorting=Sorting.COMPARISON,
            tiled=False, fuses_into_matmuls=False, relays_shards=False, copies_shards=True,
            narrows_stacks=True, gpu_kernels=False,
            launches=False, rounds_operands=False, late_gradients=False, holds_in_flight=False,
            compiles_ahead=False, described=False, judge="measure",
            serves_by_mesh=False, attention="plain",
        ),
    )
}  # fmt: skip
"""Every backend by its name."""
