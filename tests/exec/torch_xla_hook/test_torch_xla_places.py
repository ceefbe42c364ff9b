"""Topology of PyTorch/XLA's devices, from the runtime's attributes. No TPU is needed."""

import itertools
from typing import Any

import pytest

from autoshard.cost import Topology, chip_names, load_chip
from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.planning.runtime_topology import tpu_topology


def attributes(topology: Topology) -> list[dict[str, Any]]:
    """Return the runtime's attributes of every device of a topology."""
    rows = []
    for number in range(topology.num_devices):
        where, coords, core = topology.coords(number)
        rows.append({"name": f"TPU:{number}", "coords": list(coords), "core_on_chip": core, "slice_index": where})
    return rows


TPUS = [load_chip(name) for name in chip_names() if load_chip(name).backend == "tpu"]


@pytest.mark.parametrize(("chip", "kind"), [(chip, kind) for chip in TPUS for kind in chip.device_kinds])
def test_every_generation_is_known_by_what_its_devices_are_called(chip, kind):
    for shape, slices in itertools.product(chip.small_shapes[1:3], (1, 2)):
        topology = Topology.make(chip, shape, slices)
        assert tpu_topology(kind, attributes(topology)) == topology.name


def test_a_kind_that_no_chip_file_names_is_refused():
    with pytest.raises(UserError, match="kind 'TPU v99' are not known: set AUTOSHARD_TOPOLOGY, for example to v5e:4x4"):
        tpu_topology("TPU v99", attributes(Topology.parse("v5e:2x2")))
