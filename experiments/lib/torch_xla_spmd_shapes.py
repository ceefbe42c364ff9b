"""The subjects of PyTorch/XLA's tests of SPMD, written independently; `torch_xla_spmd.py` runs them both ways."""

import tempfile
import unittest
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla import _XLAC  # pyrefly: ignore[missing-attribute]


xr.use_spmd()
# Torch counts its devices when it computes the first gradient.
torch.ones(1, requires_grad=True).to("xla").sum().backward()


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> xs.Mesh:
    return xs.Mesh(np.arange(xr.global_runtime_device_count()), shape, names)


def sharding(tensor: Any) -> str:
    return _XLAC._get_xla_sharding_spec(tensor)


def compiled() -> int:
    """Return the number of programs compiled so far."""
    metric = met.metric_data("CompileTime")
    return 0 if metric is None else metric[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x)))


def train(model: Any, data: Any, target: Any, steps: int = 4) -> list[float]:
    """Return the losses of some steps of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


class Marks(unittest.TestCase):
    """Tests of marked tensors: their specs, and values computed from them."""

    def setUp(self) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(16, 32)

    def test_a_mark_is_what_it_was_asked_for(self) -> None:
        for spec, said in (((0, 1), "devices=[4,2]"), ((0, None), "devices=[4,1,2]"), ((None, None), "replicated")):
            marked = xs.mark_sharding(self.x.to("xla"), mesh_of(4, 2), spec)
            self.assertIn(said, marked.sharding_spec)
            self.assertEqual(marked.sharding_spec, sharding(marked.global_tensor))

    def test_values_are_those_of_the_whole_tensor(self) -> None:
        marked = xs.mark_sharding(self.x.to("xla"), mesh_of(2, 4), (1, 0)).global_tensor
        torch_xla.sync()
        self.assertTrue(torch.equal(marked.cpu(), self.x))
        self.assertTrue(torch.allclose((marked @ marked.T).sum().cpu(), (self.x @ self.x.T).sum(), rtol=1e-4))

    def test_each_device_has_its_own_part(self) -> None:
        marked = xs.mark_sharding(self.x.to("xla"), mesh_of(8, 1), (0, None))
        parts = marked.local_shards
        self.assertEqual([tuple(part.data.shape) for part in parts], [(2, 32)] * 8)
        self.assertTrue(torch.equal(torch.cat([part.data for part in parts]), self.x))

    def test_a_name_of_an_axis_is_as_good_as_its_number(self) -> None:
        named = xs.mark_sharding(self.x.to("xla"), mesh_of(4, 2, names=("rows", "columns")), ("rows", "columns"))
        numbered = xs.mark_sharding(self.x.to("xla"), mesh_of(4, 2), (0, 1))
        self.assertEqual(named.sharding_spec, numbered.sharding_spec)

    def test_a_mark_is_taken_off_and_put_on_again(self) -> None:
        marked = xs.mark_sharding(self.x.to("xla"), mesh_of(8, 1), (0, None))
        cleared = xs.clear_sharding(marked)
        self.assertEqual(sharding(cleared), "")
        again = xs.mark_sharding(cleared, mesh_of(1, 8), (None, 1))
        self.assertIn("devices=[1,8]", again.sharding_spec)

    def test_results_are_split_as_what_they_are_of(self) -> None:
        marked = xs.mark_sharding(self.x.to("xla"), mesh_of(8, 1), (0, None)).global_tensor
        doubled = marked * 2
        torch_xla.sync()
        self.assertIn("devices=[8,1]", sharding(doubled))

    def test_a_gradient_goes_through_a_mark(self) -> None:
        x = self.x.to("xla").requires_grad_()
        y = xs.mark_sharding_with_gradients(x * 3, mesh_of(8, 1), (0, None))
        (y * y).sum().backward()
        torch_xla.sync()
        assert x.grad is not None
        self.assertTrue(torch.allclose(x.grad.cpu(), self.x * 18, rtol=1e-5))

    def test_a_region_by_hand_sees_a_part(self) -> None:
        x = self.x.to("xla")
        part = xs.enable_manual_sharding(x, (0, None), mesh=mesh_of(8, 1)).global_tensor
        self.assertEqual(tuple(part.shape), (2, 32))
        whole = xs.disable_manual_sharding(part + 1, (0, None), x.shape, mesh=mesh_of(8, 1)).global_tensor
        self.assertTrue(torch.equal(whole.cpu(), self.x + 1))


class Steps(unittest.TestCase):
    """Tests of training and inference steps, with the user's own marks or none."""

    def setUp(self) -> None:
        torch.manual_seed(0)
        self.model, self.data, self.target = Net(), torch.randn(32, 16), torch.randint(0, 8, (32,))
        twin = Net()
        twin.load_state_dict(self.model.state_dict())
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        self.wanted = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(twin(self.data), self.target)
            loss.backward()
            optimizer.step()
            self.wanted.append(loss.item())

    def test_losses_are_those_of_the_host(self) -> None:
        losses = train(self.model.to("xla"), self.data.to("xla"), self.target.to("xla"))
        self.assertTrue(np.allclose(losses, self.wanted, rtol=1e-4))

    def test_losses_with_marks_of_ones_own(self) -> None:
        model = self.model.to("xla")
        xs.mark_sharding(model.first.weight, mesh_of(2, 4), (1, None))
        xs.mark_sharding(model.second.weight, mesh_of(2, 4), (None, 1))
        data = xs.mark_sharding(self.data.to("xla"), mesh_of(2, 4), (0, None)).global_tensor
        losses = train(model, data, self.target.to("xla"))
        self.assertTrue(np.allclose(losses, self.wanted, rtol=1e-4))
        self.assertIn("devices=[4,1,2]", sharding(model.first.weight))

    def test_momentum_is_split_as_its_parameter(self) -> None:
        model = self.model.to("xla")
        xs.mark_sharding(model.first.weight, mesh_of(8, 1), (0, None))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        nn.functional.cross_entropy(model(self.data.to("xla")), self.target.to("xla")).backward()
        optimizer.step()
        torch_xla.sync()
        held = optimizer.state[model.first.weight]["momentum_buffer"]
        self.assertIn("devices=[8,1]", sharding(held))

    def test_three_steps_compile_twice_at_most(self) -> None:
        before = compiled()
        train(self.model.to("xla"), self.data.to("xla"), self.target.to("xla"), 3)
        self.assertLessEqual(compiled() - before, 2)  # the first step allocates the momentum

    def test_steps_that_were_run_are_not_compiled_again(self) -> None:
        model, data, target = self.model.to("xla"), self.data.to("xla"), self.target.to("xla")
        for _ in range(2):  # the second time parameters are split already
            train(model, data, target, 3)
        before = compiled()
        train(model, data, target, 3)
        self.assertEqual(compiled() - before, 0)

    def test_a_compiled_module_infers(self) -> None:
        with torch.no_grad():
            wanted = self.model(self.data)
            compiled = torch.compile(self.model.to("xla"), backend="openxla")
            for _ in range(3):
                output = compiled(self.data.to("xla")).cpu()
        self.assertTrue(torch.allclose(output, wanted, rtol=1e-4, atol=1e-5))

    def test_a_loader_splits_batches(self) -> None:
        spec = xs.ShardingSpec(mesh_of(8, 1), (0, None))
        batches = [torch.randn(16, 16) for _ in range(3)]
        loader = pl.MpDeviceLoader(batches, torch_xla.device(), input_sharding=spec)
        for sent, batch in zip(loader, batches, strict=True):
            self.assertIn("devices=[8,1]", sharding(sent))
            self.assertTrue(torch.equal(sent.cpu(), batch))

    def test_fsdp_trains(self) -> None:
        from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

        mesh = mesh_of(8, 1, names=("fsdp", "model"))
        xs.set_global_mesh(mesh)
        model = SpmdFullyShardedDataParallel(self.model.to("xla"))
        data = xs.mark_sharding(self.data.to("xla"), mesh, ("fsdp", None)).global_tensor
        losses = train(model, data, self.target.to("xla"))
        self.assertTrue(np.allclose(losses, self.wanted, rtol=1e-4))

    def test_a_checkpoint_is_read_into_another_split(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_loader import load
        from torch.distributed.checkpoint.state_dict_saver import save
        from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner

        model, other = self.model.to("xla"), Net().to("xla")
        xs.mark_sharding(model.first.weight, mesh_of(8, 1), (0, None))
        xs.mark_sharding(other.first.weight, mesh_of(1, 8), (None, 1))
        torch_xla.sync()
        with tempfile.TemporaryDirectory() as folder:
            writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # torchax, if loaded, fails with more
            save(model.state_dict(), storage_writer=writer, planner=SPMDSavePlanner(), no_dist=True)
            state = other.state_dict()
            load(state, checkpoint_id=folder, planner=SPMDLoadPlanner(), no_dist=True)
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(state[name].cpu(), value.cpu()))

    def test_the_runtime_says_what_is_there(self) -> None:
        self.assertTrue(xr.is_spmd())
        self.assertEqual(xr.global_runtime_device_count(), 8)
        self.assertEqual(len(xm.get_xla_supported_devices()), 1)  # all devices together appear as one
        self.assertEqual(xr.world_size(), 1)


if __name__ == "__main__":
    unittest.main()
