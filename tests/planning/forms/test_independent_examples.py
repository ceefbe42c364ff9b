"""Forms that gather parameters run each process's own examples, so steps whose examples meet are refused there."""

import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree

import autoshard
from autoshard import UserError
from autoshard.errors import FormError
from autoshard.exports import export_plan
from autoshard.planning import form_named
from autoshard.planning.forms.independent_examples import check_planned, own_examples
from autoshard.planning.price.analysed_program import analyse_program, planned_part
from autoshard.program import Reduction, from_torch


class Contrast(nn.Module):
    """A projection whose rows are compared with all rows of the batch."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)

    def forward(self, x):
        hidden = F.normalize(self.up(x), dim=-1)
        scores = hidden @ hidden.T
        return F.cross_entropy(scores, torch.arange(len(scores)))


class Expert(nn.Module):
    """A layer for the first rows of the batch that ask for it, until it is full."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        asks = (x[:, :1] > 0).float()
        return x + self.up(x) * asks * (asks.cumsum(0) < 4)


class Capacity(nn.Module):
    """Scanned layers of experts with a capacity."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Graph(nn.Module):
    """Messages between nodes along edges."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x, edges):
        return torch.zeros_like(x).index_add(0, edges, self.up(x[edges]))


class Scanned(nn.Module):
    """Layers of attention; their results may be centred over the batch."""

    def __init__(self, centred):
        super().__init__()
        layers = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.layers, self.centred = nn.ModuleList(layers), centred

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x - x.mean(0, keepdim=True) if self.centred else x


class Masked(nn.Module):
    """A mean over the rows that a mask selects."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 4)

    def forward(self, x):
        mask = x[:, 0] > 0
        return (self.up(x).mean(1) * mask).sum() / mask.sum().clamp(min=1)


class Clamped(torch.autograd.Function):
    """An identity whose gradients are clamped."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


class Weighted(torch.autograd.Function):
    """A product whose `backward` computes nonlinear values, but not of the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        share = x.sigmoid()
        return gradient * (share + x * share * (1 - share)).clamp(-1, 1)


class Applied(nn.Module):
    """Layers, each followed by a function with a `backward` of its own."""

    def __init__(self, function, layers):
        super().__init__()
        self.layers, self.function = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers)), function

    def forward(self, x):
        for layer in self.layers:
            x = self.function(layer(x))
        return x


def squares(output):
    return output.square().mean()


class Averaged(nn.Module):
    """A layer that counts its calls, and keeps an average of its examples in a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        out = self.norm(self.up(x))
        self.calls += 1
        self.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out


class Towers(nn.Module):
    """Two towers, whose scores are of each pair against the rest of the batch; no op ties their inputs."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 8), nn.Embedding(10, 8)

    def forward(self, x, ids):
        scores = self.one(x) @ self.two(ids).T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


X, SEQUENCES = torch.ones(8, 16), torch.ones(6, 8, 16)
MEETING = {
    "contrast": (Contrast, X, None, r"`dot_general`, which mixes examples, at .*py:\d+;"),
    "towers": (Towers, (X, torch.zeros(8, dtype=torch.long)), None, r"`dot_general`, which mixes examples"),
    "averaged": (Averaged, X, squares, "from which this step computes its buffer `mean`: each process"),
    "capacity": (Capacity, X, squares, r"`cumsum`, which mixes examples, at .*py:\d+;"),
    "graph": (Graph, (X, torch.zeros(24, dtype=torch.int32)), squares, r"`gather`, which mixes examples, at .*py:\d+;"),
    "centred": (lambda: Scanned(True), SEQUENCES, squares, r"`sub`, which mixes examples, at .*py:\d+;"),
    "clamped": (
        lambda: Applied(Clamped.apply, 1),
        X,
        squares,
        "`lt` of gradients in the `backward` of `Clamped`, which is not linear",
    ),
    "clamped layers": (lambda: Applied(lambda x: Clamped.apply(x), 3), X, squares, "`backward` of `Clamped`, which is"),
    "deviation": (
        lambda: nn.Linear(16, 4),
        X,
        lambda out: out.var(0).mean(),
        "`sub` of what is reduced over examples, at",
    ),
}


@pytest.mark.parametrize("name", MEETING)
def test_a_step_whose_examples_meet_is_not_planned_for_fsdp(name):
    make, inputs, loss, said = MEETING[name]
    program = from_torch(make(), inputs, train=True, loss=loss)
    with pytest.raises(UserError, match=f"fsdp2 form .*{said}.* plan with --for dtensor"):
        check_planned(form_named("fsdp2"), program)
    check_planned(form_named("dtensor"), program)


def test_a_parameter_without_dims_is_refused_for_fsdp():
    """Name the parameter at once: torch's `fully_shard` would refuse it in each process."""

    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.heat = nn.Linear(16, 16), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.up(x) * self.heat

    program = from_torch(Tempered(), X, train=True, loss=squares)
    with pytest.raises(UserError, match=r"no parameter without dims, as `heat` is: make its shape \[1\]"):
        check_planned(form_named("fsdp2"), program)
    check_planned(form_named("dtensor"), program)
    plan = autoshard.plan(program, topology="cpu:2", mesh={"data": 2}, pins={"batch.x": "data,None"})
    with pytest.raises(FormError, match=r"as `heat` is.*--force"):
        export_plan(plan, "fsdp2", program)


def test_microbatches_of_a_nonlinear_backward_are_noted():
    for function, noted in ((Clamped.apply, True), (Weighted.apply, False)):
        program = from_torch(Applied(function, 2), X, train=True, loss=squares, microbatches=2)
        assert any("means over 2 parts" in note and "`Clamped`" in note for note in program.notes) is noted


class Repeated(nn.Module):
    """A layer of a sequence after a learned token, with a pattern and a mask of places that every example has."""

    def __init__(self):
        super().__init__()
        self.token, self.up = nn.Parameter(torch.zeros(1, 1, 16)), nn.Linear(16, 16)

    def forward(self, x):
        tokens = torch.cat([self.token.repeat(len(x), 1, 1), x], 1)
        pattern = torch.arange(3.0).repeat(len(x)).view(len(x), 3, 1)
        hidden = torch.zeros(x.shape[:2]).masked_fill(x[..., 0] > 0, -1.0)
        return self.up(tokens + pattern[:, :1]) + hidden.sum(1)[:, None, None]


class Dropped(nn.Module):
    """A recurrence over places whose weight is multiplied by a mask that is an input."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.up = nn.Parameter(torch.eye(16)), nn.Linear(16, 16)

    def forward(self, x, mask):
        state = torch.zeros(len(x), 16)
        for place in range(x.shape[1]):
            state = torch.tanh(self.up(x[:, place]) + state @ (self.recurrent * mask).T)
        return state


class Listed(nn.Module):
    """A layer of a token that is listed once for each example."""

    def __init__(self):
        super().__init__()
        self.token, self.up = nn.Parameter(torch.zeros(16)), nn.Linear(16, 16)

    def forward(self, x):
        return self.up(torch.stack([self.token] * len(x)) + x)


def test_a_masked_weight_is_gathered_and_examples_stay_apart():
    """Split the batch in the price too, as the export runs it."""
    program = from_torch(Dropped(), (torch.ones(8, 6, 16), torch.ones(16, 16)), train=True, loss=squares)
    plan = autoshard.plan(program, topology="cpu:4", mesh={"data": 2, "model": 2}, form="fsdp2")
    assert plan.batch_axes and plan.arguments["batch.x"].dims[0] == plan.batch_axes
    assert not plan.arguments["batch.mask"].axes


def test_operations_for_each_example_are_refused_with_their_line():
    program = from_torch(Listed(), X, train=True, loss=squares)
    with pytest.raises(UserError, match=r"operations that depend on the number of examples, at .*py:\d+;"):
        check_planned(form_named("fsdp2"), program)


INDEPENDENT = {
    "repeated": (Repeated, SEQUENCES, squares, Reduction.MEAN),
    "weighted": (lambda: Applied(Weighted.apply, 3), X, squares, Reduction.MEAN),
    "layers": (lambda: Scanned(False), SEQUENCES, squares, Reduction.MEAN),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(16, 4)),
        torch.ones(4, 8, 6),
        None,
        Reduction.MEAN,
    ),
    "recurrence": (lambda: nn.LSTM(16, 8, 2, batch_first=True), torch.ones(4, 6, 16), None, Reduction.MEAN),
    "sum": (lambda: nn.Linear(16, 4), X, lambda out: out.square().sum(), Reduction.SUM),
    "entropy": (
        lambda: nn.Linear(16, 4),
        X,
        lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long)) + 0.1 * out.square().mean(),
        Reduction.COMBINED,
    ),
    "masked": (
        Masked,
        X,
        lambda out: out,
        Reduction.COMBINED,
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", INDEPENDENT)
def test_steps_of_independent_examples_are_planned(name):
    make, inputs, loss, kind = INDEPENDENT[name]
    program = from_torch(make(), inputs, train=True, loss=loss)
    check_planned(form_named("fsdp2"), program)
    reduction = own_examples(program).reduction
    assert reduction is not None and reduction.kind is kind, reduction
    assert reduction.norms == (name == "convolution")
    assert pickle.loads(pickle.dumps(planned_part(program))).module == program.module, "helpers receive it"


FILE = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))
inputs = torch.ones(64, 16)


def loss(output):
    return {loss}
"""


def test_exports_that_gather_refuse_or_state_what_the_batch_does(tmp_path: Path):
    for text, said in (
        ("(output @ output.T).square().mean()", "`dot_general`, which mixes examples, at net.py:10"),
        ("output.square().sum()", "multiply the loss by their number"),
        ("output.view(64, 16).square().mean()", "not checked for examples that meet"),
    ):
        # Python's cache does not notice another text of the same length in the same second.
        file = tmp_path / str(len(list(tmp_path.iterdir()))) / "net.py"
        file.parent.mkdir()
        file.write_text(FILE.format(loss=text))
        options = {"train": True, "optimizer": "sgd"}
        plan = autoshard.plan(str(file), topology="cpu:2", mesh={"data": 2}, program_options=options,
                              pins={"batch.*": "data,None"})  # fmt: skip
        if "dot" in said:
            with pytest.raises(FormError, match=f"{said}; choose --to dtensor"):
                export_plan(plan, "fsdp2")
        text = export_plan(plan, "fsdp2", force=True)
        head = " ".join(text[: text.index("import")].replace("#", " ").split())
        assert said in head and "SyncBatchNorm" in head
    with pytest.raises(UserError, match="mixes examples"):
        autoshard.plan(str(tmp_path / "0" / "net.py"), topology="cpu:2", program_options=options, form="fsdp2")


class Attending(nn.Module):
    """Self-attention with torch's op, and a head."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 10)

    def forward(self, x):
        rows, length, width = x.shape
        queries, keys, values = self.qkv(x).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width).mean(1))


def attending() -> autoshard.Program:
    x, targets = torch.empty(64, 128, 128), torch.zeros(64, dtype=torch.long)
    options = {"train": True, "dtype": "bfloat16", "attention": "cudnn"}
    return from_torch(Attending(), x, targets=targets, loss=F.cross_entropy, **options)


def test_attention_of_a_gpus_kernel_keeps_examples_apart() -> None:
    program = attending()
    reduction = own_examples(program).reduction
    assert reduction is not None and reduction.kind is not Reduction.OTHER, reduction
    check_planned(form_named("fsdp2"), program)


def test_dtensor_splits_attention_of_a_gpus_kernel_as_torch_does() -> None:
    """Compare with FSDP, whose processes compute attention of their own examples."""
    given = {"topology": "h100:8", "mesh": "data=8"}
    ours, theirs = (autoshard.plan(attending(), form=form, **given) for form in ("dtensor", "fsdp2"))
    assert ours.prediction.compute_s == pytest.approx(theirs.prediction.compute_s, rel=0.1)
    assert not any("cudnn_attention" in line and "same work" in line for line in ours.warnings)
    assert any("cudnn_attention" in op.kind for op in ours.ops)


class Placed(nn.Module):
    """A layer of examples and of something that all of them share: places, or a bias of each head."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x, a):
        if a.ndim == 2:
            return self.up(x + a)
        q = self.up(x).view(*x.shape[:2], 4, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=a).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("shared", [(4, 16), (8, 16), (4, 8, 8)])
@pytest.mark.parametrize("form", ["fsdp2", None])
def test_inputs_without_examples_are_whole_in_every_process(shared: tuple[int, ...], form: str | None):
    """Accept inputs whose first dim counts places or heads, as many as there are processes or examples."""
    length = shared[-2] if len(shared) == 2 else shared[-1]
    x = torch.randn(8, length, 16)
    loss = lambda out, targets: (out - targets).square().mean()  # noqa: E731
    program = from_torch(Placed(), (x, torch.randn(*shared)), train=True, loss=loss, targets=x)
    groups = analyse_program(program, "cpu").groups
    named = {program.arguments[position].name: dim for position, dim in groups.examples.items()}
    assert named == {"batch.x": 0, "batch.targets": 0}
    reduction = own_examples(program).reduction
    assert reduction is not None and reduction.kind is Reduction.MEAN and not reduction.why
    plan = autoshard.plan(program, topology="cpu:4", mesh={"data": 4}, form=form, pins={"batch.x": "data,None,None"})
    code: dict[str, object] = {}
    exec(export_plan(plan, "fsdp2", program, force=True), code)
    assert code["INPUTS"] == {"a": None, "x": 0, "targets": 0}
    mesh = {axis: SimpleNamespace(get_local_rank=lambda size=size: size - 1) for axis, size in code["MESH"].items()}  # type: ignore[attr-defined]
    assert code["local_inputs"](mesh, x=torch.ones(8, 2))["x"].shape == (2, 2)  # type: ignore[operator]
    with pytest.raises(ValueError, match="`x` has 10 rows, which 4 processes do not divide"):
        code["local_inputs"](mesh, x=torch.ones(10, 2))  # type: ignore[operator]
    other = from_torch(Placed(), (x[:4], torch.randn(*shared)), train=True, loss=loss, targets=x[:4])
    with pytest.raises(
        UserError, match=r"`batch\.\w+` is of shape \[8, .* in the plan and of shape \[4, .* in the program"
    ):
        export_plan(plan, "fsdp2", other, force=True)


def test_inputs_are_split_alike_where_pins_leave_no_gathered_parameters(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "vit", "image_size": 32, "patch_size": 8, "architectures": ["ViTForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    pins = {"batch.pixel_values": "data,None,None,None", "*fc1.weight": "model,None", "*fc2.weight": "data,model"}
    options = {"train": True, "dtype": "float32"}
    given = {"topology": "h100:4", "mesh": {"data": 2, "model": 2}, "form": "fsdp2", "pins": pins}
    plan = autoshard.plan(f"hf:{tmp_path}/config.json", program_options=options, **given)
    assert plan.arguments["batch.labels"].dims == (("data",),)


class Scored(nn.Module):
    """A layer whose results are compared with prototypes, or weighted by a function of a grid."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x, shared):
        if shared.shape[1] == 2:
            return self.up(x) * torch.sin(shared @ shared.new_ones(2, 16)).mean(0)
        return self.up(x) @ shared.T


@pytest.mark.parametrize("shape", [(12, 16), (8, 16), (8, 2)])
def test_inputs_that_no_op_ties_to_the_batch_are_whole_if_examples_would_meet(shape: tuple[int, int]):
    loss = lambda out: (out - 1).square().mean()  # noqa: E731
    program = from_torch(Scored(), (torch.randn(8, 16), torch.randn(*shape)), train=True, loss=loss)
    own = own_examples(program)
    assert {program.arguments[position].name: dim for position, dim in own.dims.items()} == {"batch.x": 0}
    assert own.reduction is not None and own.reduction.kind is Reduction.MEAN and not own.reduction.why
    for form in ("fsdp2", None):
        pins = {"batch.x": "data,None"}
        plan = autoshard.plan(program, topology="cpu:4", mesh={"data": 4}, form=form, pins=pins)
        code: dict[str, object] = {}
        exec(export_plan(plan, "fsdp2", program, force=True), code)
        assert code["INPUTS"] == {"shared": None, "x": 0}


@dataclasses.dataclass
class Output:
    """Output of a module."""

    scores: torch.Tensor


class Closed(nn.Module):
    """A layer whose result is in a dataclass."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return Output(self.up(x))


def test_an_output_in_which_fsdp_finds_no_tensors_is_refused_until_torch_opens_it():
    program = from_torch(Closed(), (torch.randn(8, 16),), train=True, loss=lambda out: out.scores.square().mean())
    with pytest.raises(UserError, match=r"fsdp2 form finds no tensors in the `Output` .*register_dataclass\(Output\)"):
        autoshard.plan(program, topology="cpu:4", mesh={"data": 4}, form="fsdp2")
    plan = autoshard.plan(program, topology="cpu:4", mesh={"data": 4}, pins={"batch.x": "data,None"})
    with pytest.raises(FormError, match="finds no tensors in the `Output`"):
        export_plan(plan, "fsdp2", program)
    _pytree.register_dataclass(Output)
    assert autoshard.plan(program, topology="cpu:4", mesh={"data": 4}, form="fsdp2").origin.form == "fsdp2"
