"""A tiny model of transformers as a module that returns its loss, and a functional graph of it compared with eager
torch.
"""

import collections
import json
import re
from typing import Any

from experiments.lib.programs.tiny_configs import tiny
from experiments.models.models import _decodes, class_of


WAYS = ("export", "decomposed", "lowered", "functionalize", "equal", "dropout")
CAUSES = {
    "asks for values, or makes sizes that depend on values": "data-dependent|DynamicOutput|_dense|backed|tolist|alloc",
    "a dependent size is left in the graph": "no lowering: <built-in|sym_constrain",
    "an operation has no lowering": "no lowering",
    "assigns tensors to attributes": "assigned during export|leaked",
    "writes in place where torch forbids it": "in-place|inplace|mutat|Mutat",
    "an operation has no fake or functional form": "mplemented|UnsupportedOperator|vmap",
    "fake and real tensors meet": "FakeTensor|fake mode|fake_mode",
    "takes too long": "not done",
}
MOST = 200_000_000
"""Parameters of the largest form that is run."""


def step_of(kind: str, rung: int) -> tuple[Any, dict[str, Any]]:
    """Return a module that computes the loss of a tiny model on the host, and its inputs.

    Raises if the module does not run, and `MemoryError` if the model is too large.
    """
    import numpy as np
    import torch

    from autoshard.program.hf.hf_eager import _loss, hf_eager
    from autoshard.program.hf.hf_model import build_model, runnable_part
    from autoshard.program.hf.task_inputs import tasks_of
    from autoshard.program.torch.module_mode import evaluation_mode

    fields = json.loads(json.dumps(tiny(kind, rung, _decodes(class_of(kind))), default=str))
    meta, _ = runnable_part(build_model(kind, fields, "float32"))
    if (count := sum(each.numel() for each in meta.parameters())) > MOST:
        raise MemoryError(f"{count} parameters")
    sizes: dict[str, Any] = {"batch": 2, "image": None, "train": True, "dtype": "float32"}
    try:
        tasks = tasks_of(meta, kind, seq=64, **sizes)
    except Exception:
        tasks = tasks_of(meta, kind, seq=None, **sizes)

    class Step(torch.nn.Module):
        def __init__(self, model: Any, fixed: dict[str, Any]) -> None:
            super().__init__()
            self.model, self.fixed, self.labels = model, fixed, None

        def out(self, inputs: Any) -> Any:
            fixed = {key: torch.tensor(v.tolist()) if hasattr(v, "tolist") else v for key, v in self.fixed.items()}
            return self.model(**inputs, **fixed)

        def forward(self, **inputs: Any) -> Any:
            labels = None if self.labels is None else torch.zeros(self.labels, dtype=torch.int64)
            return _loss(self.model, self.out(inputs), labels)

    random, problems = np.random.default_rng(0), []
    for task in tasks:
        model = hf_eager(meta, task, True, lambda _: None, lambda _: None).rebuild(0)  # pyrefly: ignore
        for child in model.modules():
            if getattr(child, "config", None) is not None:
                child.config._experts_implementation = "batched_mm"
        evaluation_mode(model, True)
        shapes = {key: leaf for key, leaf in task.batch.items() if key != "labels"}
        draws = {key: random.integers(0, task.id_limit, leaf.shape) for key, leaf in shapes.items()}
        given = {
            key: draws[key].astype("int32") if leaf.dtype.kind == "i" else random.normal(size=leaf.shape).astype("f")
            for key, leaf in shapes.items()
        }
        made = task.call(given)
        tensors = {key: torch.as_tensor(np.array(made.pop(key))) for key in shapes if key in made}
        inputs = {key: value.long() if value.dtype == torch.int32 else value for key, value in tensors.items()}
        step = Step(model, made)
        try:
            out = step.out(inputs)
            logits = out.get("logits") if hasattr(out, "get") else None
            if logits is not None and logits.ndim > 1:
                moved = "Segmentation" in type(model).__name__ and logits.ndim == 4
                step.labels = (logits.movedim(1, -1) if moved else logits).shape[:-1]
            step(**inputs)
            return step, inputs
        except Exception as error:
            problems.append(error)
    raise problems[0]


def compare(step: Any, exported: Any, inputs: dict[str, Any]) -> None:
    """Raise if the loss or a gradient of the functional graph differs from eager torch."""
    import torch
    from torch.utils import _pytree

    parameters = dict(step.named_parameters(remove_duplicate=False))
    held = {key: value.detach().clone() for key, value in step.named_buffers(remove_duplicate=False)}
    held |= {key: value for key, value in exported.constants.items() if key not in held} | parameters
    given = iter(_pytree.tree_leaves(inputs))
    signature = exported.graph_signature
    place = [spec.kind.name for spec in signature.output_specs].index("USER_OUTPUT")
    args = [next(given) if spec.kind.name == "USER_INPUT" else held[spec.target] for spec in signature.input_specs]
    results = []
    for run in (lambda: exported.graph_module(*args)[place], lambda: step(**inputs)):
        loss = run()
        loss.backward()
        results.append({"loss": loss.detach()} | {key: p.grad for key, p in step.named_parameters()})
        step.zero_grad()
    zero = torch.zeros(())
    for key, value in results[1].items():
        # A gradient that one side lacks must be zero on the other.
        sides = [zero if each is None else each for each in (results[0][key], value)]
        if sides[0] is not sides[1]:
            left, right = torch.broadcast_tensors(*sides)
            torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def lower(exported: Any) -> None:
    """Raise `NotImplementedError` if an operation of the graph has no lowering in autoshard's environment of
    torchax.
    """
    from autoshard.program.torch.module_patches import lowered_environment

    env, names = lowered_environment(), set[str]()
    for target in {node.target for node in exported.graph.nodes if node.op == "call_function"}:
        known = target in env._ops or target in env._decomps or getattr(target, "overloadpacket", None) in env._ops
        if not known and "getitem" not in str(target):
            names.add(str(target))
    if names:
        raise NotImplementedError(f"no lowering: {', '.join(sorted(names))}")


def table(rows: dict[str, Any]) -> str:
    """Return the table of counts and that of causes."""
    ran = [row for row in rows.values() if row["eager"] == "works"]
    lines = [f"{len(rows)} types tried, {len(ran)} run in eager torch on the inputs.", "", "| way | works | of |"]
    lines += ["| --- | --- | --- |"]
    for way in WAYS:
        reached = [row[way] for row in ran if way in row]
        lines += [f"| {way} | {reached.count('works')} | {len(reached)} |"]
    either = sum("works" in (row.get("lowered"), row.get("functionalize")) for row in ran)
    lines += [
        f"| lowered or functionalize | {either} | {len(ran)} |",
        "",
        "| way | cause | types |",
        "| --- | --- | --- |",
    ]
    for way in WAYS:
        causes = collections.defaultdict[str, list[str]](list)
        for kind, row in rows.items():
            if row["eager"] == "works" and row.get(way, "works") != "works":
                texts = (text for text, words in CAUSES.items() if re.search(words, row[way]))
                causes[next(texts, row[way][:80])].append(kind)
        lines += [f"| {way} | {text} | {len(kinds)}: {', '.join(kinds)} |" for text, kinds in causes.items()]
    return "\n".join(lines)
