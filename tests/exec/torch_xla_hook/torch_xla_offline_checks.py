"""Scripts for `test_torch_xla_offline.py`: plans that are made before any tensor is on a device."""

from typing import Any

from tests.exec.torch_xla_hook.torch_xla_checks import Check, mlp, report, spec


CHECKS: dict[str, Check] = {}


def script(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


class HostMemory:
    """Peak bytes of live host tensors while the context is active, without the memory of the XLA devices."""

    def __init__(self) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._python_dispatch import TorchDispatchMode

        sizes: dict[int, tuple[Any, int]] = {}
        memory = self
        self.peak = 0

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                made = func(*args, **(kwargs or {}))
                if getattr(made, "device", None) is not None and made.device.type == "cpu":
                    storage = made.untyped_storage()
                    sizes[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                alive = {key: (ref, size) for key, (ref, size) in sizes.items() if not ref.expired()}
                sizes.clear()
                sizes.update(alive)
                memory.peak = max(memory.peak, sum(size for _, size in alive.values()))
                return made

        self.mode = Mode()


def deferred(device: str) -> dict[str, Any]:
    """Measure the live host tensors while a module of 100 million bytes, created on `device`, is moved to 8 devices."""
    import torch
    import torch_xla.runtime as xr

    import autoshard
    from autoshard.program import from_torch

    xr.use_spmd()
    layers, width, inner = 16, 1024, 1536

    def made(device: str) -> Any:
        with torch.device(device):
            shapes = [(inner, width) if number % 2 else (width, inner) for number in range(layers)]
            return torch.nn.Sequential(*(torch.nn.Linear(a, b, bias=False) for a, b in shapes))

    program = from_torch(made("meta"), torch.empty(8, width, device="meta"))
    pins = {f"[{first}::2].weight": "-,data,-" for first in range(2)}  # equal layers are planned as one loop
    plan = autoshard.plan(program, topology="cpu:8", mesh={"data": 8}, pins=pins)
    size = 4 * layers * width * inner
    host = HostMemory()
    with host.mode:
        model = plan.mark(made(device))
    return {
        "peak": host.peak / size,
        "held": sorted({spec(p) for p in model.parameters()}),
        "spread": float(next(model.parameters()).std()) * width**0.5,
    }


@script
def shard_by_shard() -> dict[str, Any]:
    return deferred("meta")


@script
def whole_first() -> dict[str, Any]:
    return deferred("cpu")


@script
def nested_batches() -> dict[str, Any]:
    """Load batches that are dicts, and tuples of dicts, with inputs that are split in several ways."""
    import torch
    import torch_xla.distributed.parallel_loader as loader
    import torch_xla.runtime as xr

    import autoshard
    from autoshard.planning import parse_hlo_sharding
    from autoshard.program import from_torch

    xr.use_spmd()

    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(64, 256)

        def forward(self, batch: Any) -> Any:
            one, more = batch
            return self.up(one) * more["scale"] + more["shift"]

    with torch.device("meta"):
        model = Pair()
        inputs = (torch.empty(32, 64), {"scale": torch.empty(32, 256), "shift": torch.empty(1, 256)})
    pins = {"batch.batch.0": "data,-", "batch.batch.1.scale": "data,model", "batch.batch.1.shift": "-,model"}
    program = from_torch(model, (inputs,))
    plan = autoshard.plan(program, topology="cpu:8", mesh="4,2", pins=pins)
    batch = (torch.randn(32, 64), {"scale": torch.randn(32, 256), "shift": torch.randn(1, 256)})
    (sent,) = loader.MpDeviceLoader([batch], "xla", input_sharding=plan.input_sharding)
    return {
        "sent": [str(parse_hlo_sharding(spec(each), 2, plan.mesh)) for each in (sent[0], *sent[1].values())],
        "planned": [str(plan.arguments[name]) for name in pins],
        "same": bool((sent[1]["scale"].cpu() == batch[1]["scale"]).all()),
    }


def parts_of(plan: Any, name: str) -> dict[int, tuple[slice, ...]]:
    """Return each device's part of a parameter, from the plan's spec, mesh and order of devices."""
    shape, sizes = plan.shapes[name], plan.mesh
    parts = {}
    for place, device in enumerate(plan.device_order):
        at = {}
        for axis in reversed(sizes):
            place, at[axis] = divmod(place, sizes[axis])
        slices = []
        for size, axes in zip(shape, plan.arguments[name].dims, strict=True):
            position, count = 0, 1
            for axis in axes:
                position, count = position * sizes[axis] + at[axis], count * sizes[axis]
            slices.append(slice(position * size // count, (position + 1) * size // count))
        parts[device] = tuple(slices)
    return parts


def planned_mlp(mesh: str, pins: dict[str, str]) -> tuple[Any, Any]:
    """Return a plan, and a module materialised by it."""
    import torch

    import autoshard
    from autoshard.program import from_torch

    with torch.device("meta"):
        model = mlp(64)
    program = from_torch(model, torch.empty(16, 64, device="meta"))
    plan = autoshard.plan(program, topology="cpu:8", mesh=mesh, pins=pins)
    return plan, plan.mark(model)


@script
def shards() -> dict[str, Any]:
    """Compare local shards with the plan's, for splits over one axis, both, and none."""
    import torch
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()

    def wrong(plan: Any, model: Any) -> list[str]:
        """List the parameters whose shards are not the plan's parts of the whole."""
        names = []
        for name, parameter in model.named_parameters():
            whole = parameter.detach().cpu()
            held = xs.wrap_if_sharded(parameter).local_shards
            parts = parts_of(plan, name)
            if len(held) != 8 or any(not torch.equal(s.data, whole[parts[d]]) for d, s in enumerate(held)):
                names.append(name)
        return names

    models = [
        planned_mlp("4,2", {"0.weight": "data,model", "0.bias": "data", "2.weight": "-,data+model"}),
        planned_mlp("2,4", {"0.weight": "model,-", "0.bias": "-", "2.weight": "data+model,-"}),
    ]
    return {
        "wrong": [wrong(*each) for each in models],
        "specs": [[spec(p) for p in model.parameters()] for _, model in models],
    }


@script
def state_between_plans() -> dict[str, Any]:
    """Load the state of each of three plans under the next one: a tensor split in one plan is whole in another."""
    import itertools
    import tempfile

    import torch
    import torch_xla
    import torch_xla.runtime as xr
    from torch_xla.experimental.distributed_checkpoint import prime_optimizer

    from autoshard import UserError, predict_reshard
    from autoshard.torch_xla import load_state, save_state

    xr.use_spmd()
    plans = {
        "4,2": {"0.weight": "data,model", "0.bias": "data", "2.weight": "-,data+model", "2.bias": "-"},
        "2,2,2": {"0.weight": "-,-", "0.bias": "-", "2.weight": "axis2,model", "2.bias": "data"},
        "8": {"0.weight": "-,data", "0.bias": "data", "2.weight": "-,-", "2.bias": "data"},
    }
    planned = {mesh: planned_mlp(mesh, pins)[0] for mesh, pins in plans.items()}

    def trained(mesh: str) -> tuple[Any, Any]:
        model = planned_mlp(mesh, plans[mesh])[1]
        updater = torch.optim.AdamW(model.parameters())
        (model(torch.randn(16, 64).to("xla")) ** 2).mean().backward()
        updater.step()
        torch_xla.sync()
        return model, updater

    def tensors(model: Any, updater: Any) -> list[Any]:
        states = [value for parameter in model.parameters() for value in updater.state[parameter].values()]
        return [*model.parameters(), *states]

    def state(model: Any, updater: Any) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": updater.state_dict()}

    def specs(model: Any, updater: Any) -> list[str]:
        return [spec(tensor) for tensor in tensors(model, updater) if tensor.dim()]

    rows, said = [], []
    for one, other in itertools.permutations(plans, 2):
        source, target = trained(one), (planned_mlp(other, plans[other])[1],)
        target = (*target, prime_optimizer(torch.optim.AdamW(target[0].parameters())))
        before = specs(*target)
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = planned[one], planned[other]
            save_state(state(*source), folder)
            unknown = load_state(state(*target), folder, plan=theirs)
            save_state(state(*source), folder, plan=ours)
            found = load_state(state(*target), folder, plan=theirs)
            for wrong in ({"more": source[0][0].weight}, {"model": {"0.bias": source[0][2].bias}}):
                try:
                    load_state(wrong, folder)
                except UserError as error:
                    said.append(str(error).replace(folder, "FOLDER"))
        pairs = zip(tensors(*source), tensors(*target), strict=True)
        rows.append(
            {
                "equal": all(torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in pairs),
                "kept": specs(*target) == before,
                "moved": specs(*source) != before,
                "predicted": unknown is None and found == predict_reshard(ours, theirs) and any(found.received_bytes),
            }
        )
    return {"rows": rows, "said": sorted(set(said))}


if __name__ == "__main__":
    report(CHECKS)
