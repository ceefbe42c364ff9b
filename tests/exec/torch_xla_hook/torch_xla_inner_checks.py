"""Scripts for `test_torch_xla_moves.py` and `test_torch_xla_ops.py`: internals of the hook."""

import copy
import tempfile
from typing import Any

from tests.exec.torch_xla_hook.torch_xla_checks import (
    CHECKS,
    check,
    compiled,
    difference,
    mlp,
    report,
    shown,
    spec,
    train,
)


@check
def moves() -> dict[str, Any]:
    """Split inputs that pass through the host, in a training loop and for values that are read at once."""
    import torch
    import torch_xla.debug.metrics as metrics

    from autoshard.exec.torch_xla_hook.lifecycle import hook_session

    split, fetched, inputs = hook_session.split_inputs, [], []

    def counted(taken: Any, decision: Any, *given: Any) -> Any:
        before = (metrics.metric_data("InboundData") or (0,))[0]
        found = split(taken, decision, *given)
        fetched.append((metrics.metric_data("InboundData") or (0,))[0] - before)
        inputs.append(sum(spec is not None and bool(spec.axes) for spec in decision.specs))
        return found

    hook_session.split_inputs = counted  # pyrefly: ignore[bad-assignment]
    found = shown(train(4))
    plain = mlp(128).requires_grad_(False)
    model = copy.deepcopy(plain).to("xla")
    x, before, read, counts = torch.randn(64, 128), compiled(), [], []
    for _ in range(3):
        read.append(model(x.to("xla")).square().sum().item())
        counts.append(compiled() - before)
    hook_session.split_inputs = split
    expected = plain(x).square().sum().item()
    return {
        **found,
        "fetched": fetched,
        "inputs_split": inputs,
        "read": max(abs(value - expected) / expected for value in read),
        "read_compiles": counts,
        "read_parameters": [spec(p) for p in model.parameters()],
    }


@check
def told_ops() -> dict[str, Any]:
    """Report the observed ops of nested observers, at kernels and through a mode, without the observers' own ops."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from autoshard.exec.torch_xla_hook.capture.op_events import OpObserver, stand_in, without_observers

    class Told(OpObserver):
        def __init__(self, *kinds: str) -> None:
            super().__init__(kinds)
            self.before_them: list[str] = []
            self.after_them: list[str] = []

        def before(self, kind: str, turn: int, operands: Any) -> Any:
            self.before_them.append(f"{kind} {turn}")
            return [torch.clone(value) @ torch.eye(3, device="xla") for value in operands]

        def after(self, kind: str, turn: int, results: Any) -> None:
            self.after_them.append(f"{kind} {turn} {len(results)}")

    x, bias = torch.rand(3, 3), torch.rand(3)
    outer, inner, moded = (
        Told("aten.mm.default"),
        Told("aten.mm.default", "aten.addmm.default"),
        Told("aten.tanh.default"),
    )
    here, b = x.to("xla"), bias.to("xla")
    modes = []
    with outer:
        first = here @ here
        with inner:
            second = torch.addmm(b, first, here)
            modes.append(_get_current_dispatch_mode() is not None)
            with without_observers():
                second = second @ here
        with moded:
            modes.append(_get_current_dispatch_mode() is not None)
            third = torch.tanh(second) @ here
    third = third @ here  # no observer is active
    fewer = {}
    for name, kinds in {
        "of another kind": {"aten.bmm.default"},
        "of the kind": {"aten.mm.default"},
        "all": None,
    }.items():
        stand_in(kinds)
        told = Told("aten.mm.default")
        with told:
            _ = here @ here
        fewer[name] = len(told.before_them)
    expected = torch.tanh(torch.addmm(bias, x @ x, x) @ x) @ x @ x
    return {
        "outer": [outer.before_them, outer.after_them],
        "inner": [inner.before_them, inner.after_them],
        "moded": moded.before_them,
        "modes": modes,
        "stood_in": fewer,
        "difference": difference(third, expected),
    }


@check
def made_inside() -> dict[str, Any]:
    """Create tensors from nothing in an observed block. Write to them through views, and read them through others."""
    import torch

    from autoshard.exec.torch_xla_hook.capture.op_events import OpObserver
    from autoshard.exec.torch_xla_hook.values.lazy_tensors import xlac

    x = torch.randn(4, 6)

    def make(x: Any) -> list[Any]:
        at = x.device
        doubled = torch.ones(4, 6, device=at)
        doubled[:, 1:].mul_(2)
        mask = torch.full((4, 4), -1.0, device=at)
        mask[:, :2] = 3
        taken = torch.zeros(4, 6).to(at)
        taken[1:3] = x[1:3]
        cleared = torch.empty(3, device=at).fill_(2)
        cleared[1:].zero_()
        like = x.new_zeros(5)
        like[2:] += 1
        given = torch.tensor([1.0, 2.0, 3.0], device=at)
        given[:1] += 5
        places = torch.arange(8, device=at).unsqueeze(0).expand(3, -1)
        return [doubled, mask, taken, cleared, like, given, torch.diff(places, prepend=places[:, :1] - 1, dim=-1)]

    here = x.to("xla")
    alone = make(here)
    with OpObserver():
        told = make(here)
    graphs = [xlac()._get_xla_tensors_text(made) for made in (alone, told)]
    return {
        "same graph": graphs[0] == graphs[1],
        "differences": [difference(ours.float(), theirs.float()) for ours, theirs in zip(told, make(x), strict=True)],
    }


@check
def chunked() -> dict[str, Any]:
    """Compare chunks, which are slices in the lazy graph, and strided views. Also compare the gradients of chunks."""
    import torch

    from autoshard.exec.torch_xla_hook.values.lazy_tensors import xlac

    def gates(x: Any) -> list[Any]:
        return list(x.unsafe_chunk(4, 1))

    def unlike(x: Any) -> list[Any]:
        return [*x.unsafe_split(3, 1), *x.unsafe_split_with_sizes([1, 3], 0), *x[:, 2:].unsafe_split(4, -1)]

    def strided(x: Any) -> list[Any]:
        return [x[::2].as_strided((2, 8), (8, 1)), (x * 1)[1:3].as_strided((1, 8), (8, 1), 0)]

    def lstm(x: Any) -> list[Any]:
        torch.manual_seed(0)
        return [torch.nn.LSTM(8, 4).to(x.device)(x.unsqueeze(0))[0]]

    results = {}
    for make in (gates, unlike, strided, lstm):
        plain = torch.randn(4, 8)
        ours, theirs = plain.to("xla").requires_grad_(), plain.clone().requires_grad_()
        made = [make(ours), make(theirs)]
        looked_up = "aten::take" in xlac()._get_xla_tensors_text(made[0])
        pairs = [*zip(*made, strict=True)]
        if make is not strided:  # PyTorch/XLA's gradients of strided views are wrong with and without our hook
            for values in made:
                torch.stack([(value**2).sum() for value in values]).sum().backward()
            pairs.append((ours.grad, theirs.grad))
        results[make.__name__] = [looked_up, max(difference(*pair) for pair in pairs)]
    return results


@check
def told_parts() -> dict[str, Any]:
    """Report the observed loop, and the two convolutions of one backward pass."""
    import torch
    from torch_xla.experimental.scan import scan

    from autoshard.exec.torch_xla_hook.capture.op_events import OpObserver, stand_in

    class Told(OpObserver):
        def __init__(self) -> None:
            super().__init__({"xla.scan", "aten.convolution_backward.default"})
            self.told: list[Any] = []

        def after(self, kind: str, turn: int, results: Any) -> None:
            self.told.append([kind, [None if value is None else list(value.shape) for value in results]])

    def summed(total: Any, x: Any) -> tuple[Any, Any]:
        return total + x.sin(), total * x

    def convolved(net: Any, x: Any, told: Told | None = None) -> list[Any]:
        net.zero_grad()
        x = x.clone().requires_grad_()
        y = net(x)
        if told is not None:
            told.around(y.grad_fn)
        y.square().sum().backward()
        return [x.grad, net.weight.grad, net.bias.grad]

    stand_in(None)
    init, xs = torch.randn(3), torch.randn(5, 3)
    with (loop := Told()):
        total, every = scan(summed, init.to("xla"), xs.to("xla"))
    expected, stack = init, []
    for x in xs:
        expected, each = summed(expected, x)
        stack.append(each)
    net, x = torch.nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    theirs = [each.clone() for each in convolved(net, x)]
    ours = convolved(net.to("xla"), x.to("xla"), backward := Told())
    pairs = [(total, expected), (every, torch.stack(stack)), *zip(ours, theirs, strict=True)]
    return {
        "loop": loop.told,
        "backward": backward.told,
        "difference": max(difference(one, other) for one, other in pairs),
    }


@check
def composed() -> dict[str, Any]:
    """Run ops that PyTorch/XLA lacks, forward and backward, on the device and on the host."""
    import torch
    import torch.nn.functional as functional
    import torch_xla.debug.metrics as metrics

    from autoshard.exec.torch_xla_hook.values.lazy_tensors import xlac

    def bags(mode: str, **options: Any) -> Any:
        def run(table: Any) -> Any:
            ids = torch.tensor([1, 4, 2, 2, 0, 5, 4], device=table.device)
            return functional.embedding_bag(
                ids, table, torch.tensor([0, 3, 3, 5], device=table.device), mode=mode, **options
            )

        return run

    def weighted_bags(table: Any, weights: Any) -> Any:
        return bags("sum", per_sample_weights=weights)(table)

    def resampled(mode: str, **options: Any) -> Any:
        return lambda x: functional.interpolate(x, mode=mode, **options)

    ops: list[tuple[Any, tuple[tuple[int, ...], ...]]] = [
        (bags("sum"), ((6, 3),)),
        (bags("mean", padding_idx=2), ((6, 3),)),
        (weighted_bags, ((6, 3), (7,))),
        (lambda v, g: torch._weight_norm(v, g, 0), ((4, 3, 2), (4, 1, 1))),
        (functional.huber_loss, ((4, 6), (4, 6))),
        (functional.glu, ((4, 6),)),
        (torch.logaddexp, ((4, 6), (4, 6))),
        (lambda x: x.unfold(1, 3, 2), ((4, 7),)),
        (lambda x: functional.unfold(x, (3, 2), padding=1, stride=2), ((2, 3, 5, 6),)),
        (lambda x: functional.fold(x, (4, 6), 2, stride=2), ((2, 12, 6),)),
        (resampled("nearest", scale_factor=1.6), ((2, 2, 5, 4),)),
        (resampled("nearest-exact", size=7), ((2, 2, 5),)),
        (resampled("bilinear", scale_factor=1.7), ((2, 2, 5, 4),)),
        (resampled("bilinear", size=(7, 2), align_corners=True), ((2, 2, 5, 4),)),
        (resampled("trilinear", size=(2, 4, 5)), ((2, 2, 3, 3, 2),)),
    ]
    results: dict[str, list[Any]] = {"xla": [], "cpu": []}
    for op, shapes in ops:
        values = [torch.randn(shape) for shape in shapes]
        for device, found in results.items():
            given = [value.to(device).detach().requires_grad_() for value in values]
            made = op(*given)
            made.sin().sum().backward()
            found += [made.detach(), *(each.grad for each in given)]
    computed = xlac()._xla_get_cpu_tensors(results["xla"])
    return {
        "differences": [difference(one, other) for one, other in zip(computed, results["cpu"], strict=True)],
        "host": sorted(name for name in metrics.counter_names() if name.startswith("aten::")),
    }


@check
def on_host() -> dict[str, Any]:
    """Run ops that PyTorch/XLA computes on the host, on a split table and split results. Then save everything."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rest = torch.nn.Embedding(1024, 256), torch.nn.Linear(256, 1024)

        def forward(self, ids: Any) -> Any:
            return self.rest(self.table(ids).sum(1).logcumsumexp(1) + self.table.weight.median(0)[0])

    torch.manual_seed(0)
    plain = Words()
    model = copy.deepcopy(plain).to("xla")
    pairs = [(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)) for net in (model, plain)]
    losses, counts = [], []
    for _ in range(6):
        ids, aim = torch.randint(0, 1024, (64, 4)), torch.randn(64, 1024)
        for (net, updater), batch in zip(pairs, ([ids.to("xla"), aim.to("xla")], [ids, aim]), strict=True):
            updater.zero_grad()
            loss = torch.nn.functional.mse_loss(net(batch[0]), batch[1])
            loss.backward()
            updater.step()
            # A forward derivative makes zeros by an op on the host, which takes no tensor but a device.
            slope = torch.func.jvp(net.rest, (batch[1][:, :256],), (batch[1][:, 256:512],))[1]
            losses.append(torch.stack([loss, slope.mean()]))
        torch_xla.sync()
        counts.append(metrics.metric_data("CompileTime")[0])
    parameters = zip(model.parameters(), plain.parameters(), strict=True)
    with tempfile.TemporaryDirectory() as folder:
        before = metrics.metric_data("CompileTime")[0]
        xm.save(model.state_dict(), f"{folder}/model.pt")
        saving = metrics.metric_data("CompileTime")[0] - before
        saved = torch.load(f"{folder}/model.pt")
    return {
        "saved": [difference(saved[name], value) for name, value in plain.state_dict().items()],
        "saving": saving,
        "host": sorted(name for name in metrics.counter_names() if name.startswith("aten::")),
        "differences": [difference(a, b) for a, b in (*zip(losses[::2], losses[1::2], strict=True), *parameters)],
        "compiled": [after - before for before, after in zip(counts, counts[1:], strict=False)],
        "split": ["{devices=" in spec(each) for each in model.parameters()],
    }


if __name__ == "__main__":
    report(CHECKS)
