"""Memory that exports to FSDP2 state for eager torch, compared with the memory that torch tracks in a real step."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.cli import main
from autoshard.errors import FormError
from autoshard.exports import make_export
from autoshard.planning import Plan, load_plan
from autoshard.planning.forms.eager_memory import eager_peak
from autoshard.program import open_source
from tests import forked


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
STEP = """
import json, runpy, sys, warnings
import torch, transformers
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.simplefilter("ignore")
config, code, rows, length = json.loads(open(sys.argv[1]).read()), runpy.run_path(sys.argv[2]), *map(int, sys.argv[3:])
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = code["make_mesh"]("cpu")
settings = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
settings.use_cache = False
with FakeTensorMode(allow_non_fake_inputs=True):
    model = code["shard"](transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((ids,))
    with tracker:
        for _ in range(2):  # the first step makes the optimizer's state
            outputs = model(input_ids=ids, labels=ids)  # kept during the backward pass, as in most loops
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
print("PEAK", peak["Total"])
"""


def _planned(folder: Path, family: dict[str, Any], batch: int, length: int, remat: str) -> tuple[Plan, Any]:
    """Plan a training step of a small decoder for four GPUs, and return its plan and its program."""
    (folder / "config.json").write_text(json.dumps(family | SIZES))
    program = open_source(f"hf:{folder / 'config.json'}", train=True, batch=batch, seq=length, remat=remat)
    return autoshard.plan(program, topology="h100:4", mesh={"data": 4}, form="fsdp2"), program


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "batch", "length", "remat"),
    [
        # The loss's logits, activations of layers, and gradients of embedding and head make the peak.
        pytest.param(LLAMA, 16, 256, "full", marks=pytest.mark.full),
        pytest.param(QWEN, 16, 256, "full", marks=pytest.mark.full),
        pytest.param(LLAMA, 4, 16, "full", marks=pytest.mark.full),
        (QWEN, 4, 16, "full"),
    ],
)
def test_the_stated_memory_is_what_torch_tracks(
    tmp_path: Path, family: dict[str, Any], batch: int, length: int, remat: str
) -> None:
    plan, program = _planned(tmp_path, family, batch, length, remat)
    export = make_export(plan, "fsdp2", program)
    assert export.prediction is not None
    stated = eager_peak(plan, export.prediction)
    assert stated is not None and "Eager torch needs" in export.sentence
    (tmp_path / "code.py").write_text(export.text)
    (tmp_path / "step.py").write_text(STEP)
    arguments = ["step.py", "config.json", "code.py", str(batch // 4), str(length)]
    done = forked.run(arguments, cwd=tmp_path)
    peak = next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("PEAK"))
    assert stated == pytest.approx(peak, rel=0.1)


def test_a_plan_that_eager_torch_does_not_hold_is_refused(tmp_path: Path) -> None:
    plan, program = _planned(tmp_path, LLAMA, 16, 256, "full")
    needed = eager_peak(plan, plan.prediction)
    assert needed is not None and needed > 1.2 * plan.prediction.peak_bytes
    tight = dataclasses.replace(plan, memory_limit_bytes=needed - 1)
    with pytest.raises(FormError, match="eager torch does not hold this plan in the fsdp2 form: it needs .* logits"):
        make_export(tight, "fsdp2", program)
    assert "more than the" in make_export(tight, "fsdp2", program, force=True).sentence


def test_the_loss_of_a_split_head_takes_all_logits(tmp_path: Path) -> None:
    """Compare steps that differ in the axes of the batch alone: one of two parts has twice the logits of one of four.

    Each logit takes three arrays in float32 and one in bfloat16.
    """
    plan, _ = _planned(tmp_path, LLAMA, 256, 256, "full")
    split = dataclasses.replace(plan, mesh={"data": 2, "model": 2}, axis_roles={"data": ("batch",)})
    arguments = {**plan.arguments, "lm_head.weight": autoshard.planning.Spec((("model",), ("data",)))}
    needed = [eager_peak(each, plan.prediction) for each in (plan, dataclasses.replace(split, arguments=arguments))]
    assert needed[0] is not None and needed[1] is not None
    head = SIZES["vocab_size"] * SIZES["hidden_size"] * 2 // 2  # half of the head is gathered
    assert needed[1] - needed[0] == 256 * 256 * SIZES["vocab_size"] * 14 // 4 - head


@pytest.mark.full
def test_a_recipe_is_chosen_that_eager_torch_holds(tmp_path: Path) -> None:
    """Give less memory than eager torch needs for the plain recipe, and more than the step that XLA compiles."""
    plain, _ = _planned(tmp_path, LLAMA, 16, 256, "none")
    needed = eager_peak(plain, plain.prediction)
    assert needed is not None
    limit = (needed + plain.prediction.peak_bytes) // 2
    file = tmp_path / "plan.json"
    command = f"plan hf:{tmp_path / 'config.json'} --train --batch 16 --seq 256 --topology h100:4 --mesh data=4"
    assert main([*command.split(), "--memory-limit", f"{limit / 2**30:.6f}", "--for", "fsdp2", "--out", str(file)]) == 0
    chosen = load_plan(file)
    held = eager_peak(chosen, chosen.prediction)
    assert held is not None and held <= limit < needed
    assert main(["export", str(file), "--to", "fsdp2", "--out", str(tmp_path / "code.py")]) == 0
    assert main([*command.split(), "--memory-limit", f"{limit / 2**30:.6f}", "--out", str(file)]) == 0
    assert main(["export", str(file), "--to", "fsdp2", "--out", str(tmp_path / "code.py")]) == 3
