"""Train a torch module under a plan as DTensors, in four processes that a gloo group joins.

Run `python examples/torch_module.py`: it plans once, starts the processes, and each checks losses and gradients against
the plain module.
For real hardware, change `TOPOLOGY` (such as "h100:8"), `MESH` and `PROCESSES`, and take "nccl" and "cuda" for
"gloo" and "cpu".
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

import autoshard


TOPOLOGY, MESH, PROCESSES = "cpu:4", {"data": 2, "model": 2}, 4
BATCH, LENGTH, WIDTH, HEADS, VOCABULARY, STEPS = 16, 32, 128, 4, 256, 4


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y, projections = self.norm_attention(x), (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in projections)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        return self.head(x + self.down(functional.gelu(self.up(self.norm_mlp(x)))))


def loss(scores, targets):
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def train(model, tokens):
    """Run the steps, and return the losses and the gradients of the last one."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model(tokens), (tokens + 1) % VOCABULARY)  # every process gives the whole batch
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def make():
    torch.manual_seed(0)  # the same weights and tokens in every process
    return Decoder(), torch.randint(VOCABULARY, (BATCH, LENGTH))


def work(rank, folder):
    torch.set_num_threads(1)  # the processes share the processors of one host
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    plan = autoshard.load(f"{folder}/plan.json")
    mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    model, tokens = make()
    planned = plan.distribute(model, mesh, gather_outputs=True)
    losses, grads = train(planned, tokens)
    plain_losses, plain_grads = train(*make())
    if rank == 0:
        print("up.weight:", *planned.up.weight.placements, "over", *plan.mesh)
        print("planned losses:", *(f"{loss:.4f}" for loss in losses))
        print("plain losses:  ", *(f"{loss:.4f}" for loss in plain_losses))
    torch.testing.assert_close(losses, plain_losses, rtol=1e-4, atol=0.0)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.full_tensor(), plain_grads[name], rtol=1e-3, atol=1e-5)
    torch.distributed.destroy_process_group()


def main():
    with torch.device("meta"):  # nothing is allocated to plan
        module, tokens = Decoder(), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    program = autoshard.from_torch(module, tokens, train=True, loss=loss, targets=tokens)
    plan = autoshard.plan(program, topology=TOPOLOGY, mesh=MESH, axis_only={"data": "batch"})
    print(plan, *plan.words, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder, "plan.json"))
        spawn(work, (folder,), PROCESSES)  # raises if one of them does
    print("AGREES with the plain module, losses and gradients")


if __name__ == "__main__":
    main()
