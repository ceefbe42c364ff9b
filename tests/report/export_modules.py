"""Small modules that exports for torch have to get right, and the run of their code on four processes over gloo."""

import functools
import json
import os
import runpy
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


CLIP = 1e-3


class Uneven(nn.Module):
    """Ten columns, whose halves do not divide by two again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 10), nn.Linear(10, 16)

    def forward(self, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x)))


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.n, self.l = nn.Embedding(32, 16, padding_idx=0), nn.LayerNorm(16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.e.weight

    def forward(self, ids: Any) -> Any:
        return self.head(self.l(self.n(self.e(ids))))


class Heads(nn.Module):
    """Attention whose view names the heads, and leaves the sequence or nothing open."""

    def __init__(self, heads: int, width: int, open_sequence: bool) -> None:
        super().__init__()
        self.heads, self.width, self.open = heads, width, open_sequence
        self.q, self.k, self.v = (nn.Linear(16, heads * width) for _ in range(3))
        self.o = nn.Linear(heads * width, 16)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, -1 if self.open else length, self.heads, self.width).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.o(context.reshape(batch, length, -1))


class Recomputed(nn.Module):
    """Attention under a checkpoint that saves the results of matmuls, and counts the ops of both runs."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Heads(3, 4, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return x + checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)


class Experts(nn.Module):
    """Stacked experts by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 16, 8) * 0.2), nn.Parameter(torch.randn(4, 8, 16) * 0.2)
        self.r = nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        hidden = F.silu(torch.einsum("nd,edh->neh", x, self.w))
        return torch.einsum("neh,ehd,ne->nd", hidden, self.v, self.r(x).softmax(-1))


class Regroup(nn.Module):
    """Rows and columns in other groups."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(12, 4)

    def forward(self, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x)).view(-1, 12))


class Convolved(nn.Module):
    """A batch norm between convolutions, of split channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.b(F.silu(self.n(self.a(x))))


class Graph(nn.Module):
    """Messages along edges that the input names, with results of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.head = nn.Linear(16, 16), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        source, target = ((x[:, column].abs() * 100).long() % 8 for column in (0, 1))
        x = self.first(x)
        messages = torch.tanh(self.up(torch.cat([x[source], x[target]], -1)))
        nodes = torch.zeros_like(x).index_add(0, target, messages)
        return F.normalize(self.head(x + nodes), dim=-1)


class Placed(nn.Module):
    """Places that are an input, as many as there are processes; no example has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, given: Any) -> Any:
        return self.down(torch.tanh(self.up(given["x"] + given["places"])))


def squares(output: Any, targets: Any) -> Any:
    return ((output - targets) ** 2).mean()


def entropy(output: Any, targets: Any) -> Any:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def numbers(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


IDS = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(7))
BOTH, MODEL = {"data": 2, "model": 2}, {"model": 4}
OUT, IN = "model,None", "None,model"
ATTENTION = {"q.weight": OUT, "k.weight": OUT, "v.weight": OUT, "o.weight": IN}
CASES: dict[str, tuple[Any, Any, Any, Any, dict[str, int], dict[str, str]]] = {
    "uneven": (Uneven, numbers(8, 16), numbers(8, 16), squares, BOTH, {"a.weight": OUT, "b.weight": IN}),
    "tied": (Tied, IDS, IDS, entropy, BOTH, {"e.weight": OUT, "l.weight": OUT}),
    "open": (lambda: Heads(4, 8, True), numbers(4, 8, 16), numbers(4, 8, 16), squares, MODEL, ATTENTION),
    "heads": (lambda: Heads(3, 4, False), numbers(4, 6, 16), numbers(4, 6, 16), squares, MODEL, ATTENTION),
    "recomputed": (
        Recomputed,
        numbers(4, 6, 16),
        numbers(4, 6, 16),
        squares,
        BOTH,
        {f"block.{name}": spec for name, spec in ATTENTION.items()},
    ),
    "experts": (
        Experts,
        numbers(8, 16),
        numbers(8, 16),
        squares,
        BOTH,
        {"w": "model,None,None", "v": "model,None,None"},
    ),
    "convolved": (Convolved, numbers(4, 4, 4, 4), numbers(4, 4, 4, 4), squares, BOTH, {"a.weight": f"{OUT},None,None"}),
    "graph": (Graph, numbers(8, 16), numbers(8, 4), squares, BOTH, {"up.weight": OUT, "head.weight": OUT}),
    "places": (
        Placed,
        {"x": numbers(8, 4, 16), "places": numbers(4, 16)},
        numbers(8, 4, 16),
        squares,
        BOTH,
        {"up.weight": OUT, "down.weight": IN},
    ),
    "regroup": (Regroup, numbers(12, 8), numbers(16, 4), squares, MODEL, {"a.weight": OUT}),
}
"""Module, input, targets, loss, mesh and pins by name; the batch is over `data` if the mesh has it."""
MEETING = {"convolved", "graph"}
"""Cases whose examples meet, in a batch norm or in messages: parts of the batch alone have other results."""


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def step(model: Any, inputs: Any, targets: Any, loss: Any, parts: int = 1) -> dict[str, Any]:
    """Run loss, backward, clipping and an update; return their values, parameters and buffers as whole tensors.

    `parts` is the number of parts of the batch that processes hold apart.
    """
    value = loss(model(inputs), targets)
    whole(value).backward()
    said = whole(value.detach()).clone()
    if parts > 1:
        dist.all_reduce(said)
        said /= dist.get_world_size()
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)).clone()
    torch.optim.SGD(model.parameters(), lr=100.0).step()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return {"loss": said, "norm": norm} | {name: whole(each.detach()) for name, each in state.items()}


def run(folder: str, name: str, form: str) -> float:
    """Return the largest relative difference between a step under the export's code and the module's own step."""
    make, inputs, targets, loss, _, _ = CASES[name]
    torch.manual_seed(0)
    wanted = step(make(), inputs, targets, loss)
    torch.manual_seed(0)
    model, parts = make(), 1
    code = runpy.run_path(f"{folder}/{name}_{form}.py")
    mesh = code["make_mesh"]("cpu")
    if form == "torchtitan":
        code["parallelize"](model, mesh)
        parts = mesh["fsdp"].size() if "fsdp" in code["MESH"] else 1
        own = mesh["fsdp"].get_local_rank() if parts > 1 else 0
        targets, rows = targets.chunk(parts)[own], len(targets)
        named = inputs if isinstance(inputs, dict) else {"": inputs}
        named = {key: each.chunk(parts)[own] if len(each) == rows else each for key, each in named.items()}
        inputs = named.get("", named)
    else:
        code["distribute" if form == "dtensor" else "shard"](model, mesh)
        place = code["distribute_inputs" if form == "dtensor" else "local_inputs"]
        (given,) = {name.partition(".")[0] for name in code["INPUTS"]} - {"targets"}
        placed = place(mesh, **{given: inputs, "targets": targets})
        inputs, targets = placed[given], placed["targets"]
        parts = 2 if form == "fsdp2" else 1
    found = step(model, inputs, targets, loss, parts)
    return max(
        float((found[key] - each).abs().max() / each.abs().max().clamp(min=1e-3)) for key, each in wanted.items()
    )


def main() -> None:
    """Run `NAME_FORM ...` of a folder on four processes; the first prints a difference or an error for each."""
    folder, *runs = sys.argv[1:]
    rank = 0
    for number in range(1, 4):
        if not os.fork():
            rank = number
            break
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(20000 + (os.getppid() if rank else os.getpid()) % 9999),
    }
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for each in runs:
        name, _, form = each.rpartition("_")
        try:
            found[each] = run(folder, name, form)
        except Exception as error:
            found[each] = f"{type(error).__name__}: {str(error)[:300]}"
        dist.barrier()
    if rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
