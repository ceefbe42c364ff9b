"""Ways to use chips for reinforcement learning: phases, memory, parts, moved weights, and bad input."""

import dataclasses
import json
import math
import shlex

import pytest

from autoshard import cli
from autoshard.cost import Collectives, Compute, Topology, make_mesh
from autoshard.degrees import GpuRun, choose_degrees, gpu_decoder, price_forward, price_step, resident_bytes
from autoshard.errors import UserError
from autoshard.program import read_config, weight_shapes
from autoshard.reinforcement import (
    RlWorkload,
    best_trainer,
    eager_stages,
    plan_rl,
    predict_move,
    rl_model,
    samplers,
    share_chips,
    whole_part,
)
from autoshard.serving import (
    MEMORY_SHARE,
    Engines,
    Layout,
    ServingEngine,
    ServingRequests,
    StepAsked,
    config_decoder,
    layout_estimate,
)


WORK = RlWorkload(256, 500, 1000, 4000, answers=8)
QWEN = rl_model("hf:qwen2.5-7b", WORK)
H100 = Topology.parse("h100:8*2")


def test_equal_answers_take_so_many_steps_of_the_serving_model():
    """Compare a sampler's seconds with the sum over steps, each priced with its own cache."""
    work = RlWorkload(64, 256, 128, 128, answers=64)
    place = Topology.parse("h100:8")
    (found,) = [each for each in samplers(QWEN, place, work) if each.engine.devices == 4]
    assert (found.engines, found.seats) == (2, 32)
    engines = Engines(QWEN.decoder, Compute(place), ServingRequests(256, 128), ServingEngine(4))
    steps = [engines.step("decode", 32, 256 + done).step_time_s for done in range(1, 129)]
    prompts = engines.step("decode", 32, 320, 256).step_time_s - engines.step("decode", 32, 320).step_time_s
    assert found.seconds == pytest.approx(sum(steps) + prompts, rel=1e-3)
    assert found.steady_s == pytest.approx(found.seconds, rel=1e-6) and found.drained_s == 0


def test_seats_fill_the_memory():
    work = dataclasses.replace(WORK, sequences=100_000)
    place = Topology.parse("h100:1")
    limit = MEMORY_SHARE * place.usable_bytes
    (found,) = samplers(QWEN, place, work)
    assert 0.98 * limit < found.peak_bytes <= limit
    (less,) = samplers(QWEN, place, work, spent_bytes=30e9)
    assert less.seats < found.seats and less.seconds > found.seconds and less.peak_bytes <= limit - 30e9
    assert not list(samplers(QWEN, place, work, spent_bytes=70e9))


def test_the_longest_answers_leave_seats_empty():
    equal = dataclasses.replace(WORK, longest=WORK.answer)
    for tail, plain in zip(samplers(QWEN, H100, WORK), samplers(QWEN, H100, equal), strict=True):
        assert tail.seconds > 1.5 * plain.seconds and tail.drained_s > 0.4 * tail.seconds
        assert tail.steady_s < tail.seconds


def test_a_trainer_on_gpus_is_the_first_that_degrees_chooses():
    trainer = best_trainer(QWEN, H100, WORK)
    first = choose_degrees(gpu_decoder("hf:qwen2.5-7b"), "h100:8*2", "torchtitan", 256, 1500)[0]
    assert trainer.train_s == first.step.seconds
    assert trainer.score_s == price_forward(first.run)
    more = dataclasses.replace(WORK, updates=2, scores=2, references=1)
    half = choose_degrees(gpu_decoder("hf:qwen2.5-7b"), "h100:8*2", "torchtitan", 128, 1500)[0]
    twice = best_trainer(QWEN, H100, more)
    assert twice.train_s == pytest.approx(2 * half.step.seconds)
    assert twice.score_s == pytest.approx(4 * price_forward(half.run))
    assert twice.resident_bytes == pytest.approx(resident_bytes(half.run) + 2 * QWEN.decoder.params / 16)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_forward_pass_is_part_of_a_step(zero: int):
    run = GpuRun(gpu_decoder("hf:qwen2.5-7b"), H100, "torchtitan", 2048, 16, 1, 1, 2, 4, zero, "none")
    step = price_step(run)
    assert 0.3 < price_forward(run) / step.parts["microbatches"] < 0.4  # a third, but for launches and gathers
    assert resident_bytes(run) < step.peak_bytes


def test_a_pipeline_scores_with_one_bubble():
    short, long = (
        price_forward(GpuRun(gpu_decoder("hf:llama3-8b"), H100, "torchtitan", 2048, 8, 1, 2, 1, count, 2, "none"))
        for count in (4, 8)
    )
    assert 1.5 < long / short < 2


def test_microbatches_divide_a_step_of_first_estimates():
    """Compare microbatches with whole steps: all but the update repeats, and activations are those of one."""
    decoder, compute = QWEN.decoder, Compute(Topology.parse("v5p:2x2x1"))
    one = layout_estimate(decoder, compute, StepAsked(4, 1024, remat="full"), Layout(4, 1))
    four = layout_estimate(decoder, compute, StepAsked(4, 1024, remat="full", microbatches=4), Layout(4, 1))
    update = float(compute.memory_seconds(decoder.params / 4 * (2 * 12 + 4)))
    assert four.step_time_s == pytest.approx(4 * (one.step_time_s - update) + update)
    assert four.bytes == one.bytes and one.mfu < four.mfu < 1
    score = layout_estimate(decoder, compute, StepAsked(4, 4096, "score"), Layout(4, 1))
    infer = layout_estimate(decoder, compute, StepAsked(4, 4096, "infer"), Layout(4, 1))
    assert score.bytes["parameters"] == infer.bytes["parameters"] / 4
    # No gather of a v5p runs next to compute.
    gathered = Collectives(make_mesh(compute.topology, {"data": 4}), compute.calibration)
    waited = float(gathered.time("all-gather", ("data",), 2.0 * decoder.params))
    assert score.step_time_s == pytest.approx(infer.step_time_s + waited)


def test_phases_add_up():
    plan = plan_rl("hf:qwen2.5-7b", "h100:8*2", dataclasses.replace(WORK, staleness=8))
    assert list(plan.ways) == sorted(plan.ways, key=lambda way: way.step_s)
    assert {way.mode for way in plan.ways} == {"in turn", "one off", "continuous"}
    for way in plan.ways:
        learn = way.trainer.score_s + way.trainer.train_s
        other = way.move.seconds + way.offload_s
        if way.mode == "in turn":
            assert way.step_s == pytest.approx(way.sampler.seconds + learn + other)
        elif way.mode == "one off":
            assert way.step_s == pytest.approx(max(way.sampler.seconds, learn) + other) and way.staleness == 1
        else:
            assert way.step_s == pytest.approx(max(way.sampler.steady_s, learn) + other)
            assert way.staleness == 1 + math.ceil(way.sampler.longest_s / way.step_s) <= 8
        assert way.sampler.peak_bytes <= way.sampler.limit_bytes
        if way.colocated:
            assert way.mode == "in turn" and way.idle == (0, 0)
            spent = 0 if way.offload_s else way.trainer.resident_bytes
            assert way.sampler.peak_bytes + spent <= MEMORY_SHARE * H100.usable_bytes
        else:
            assert way.sampler.topology.num_devices + way.trainer.topology.num_devices == 16
            busiest = max(way.sample_s, learn) / way.step_s
            assert 1 - min(way.idle) == pytest.approx(busiest)


@pytest.mark.full
def test_on_policy_samples_wait_for_the_trainer():
    plan = plan_rl("hf:qwen2.5-7b", "h100:8*2", WORK)
    assert all(way.mode == "in turn" and way.staleness == 0 for way in plan.ways)
    assert any(way.colocated for way in plan.ways) and not all(way.colocated for way in plan.ways)


def test_state_goes_to_the_host_where_more_seats_repay_it():
    plan = plan_rl("hf:qwen2.5-7b", "h100:2", RlWorkload(2048, 500, 500, 1000))
    (way,) = plan.ways
    assert way.sampler.peak_bytes + way.trainer.resident_bytes > MEMORY_SHARE * H100.usable_bytes
    assert way.offload_s == pytest.approx(2 * way.trainer.resident_bytes / H100.chip.pcie_bytes_per_s_per_chip)
    left = samplers(QWEN, plan.topology, plan.work, way.trainer.resident_bytes)
    assert min(each.seconds for each in left) > way.sampler.seconds + way.offload_s


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("h100:8*4", [(8, 24), (16, 16), (24, 8), *((4 * n, 32 - 4 * n) for n in range(1, 8))]),
        ("h100:4", [(1, 3), (2, 2), (3, 1)]),
        ("h100:1", []),
        ("v5e:16x16*2", [(256, 256)]),
        ("v5p:4x4x8", [(64, 64)]),
        ("v6e:4x8", [(16, 16)]),
        ("tpu7x:4x4x8", [(128, 128)]),
    ],
)
def test_parts_are_all_devices(name: str, sizes: list[tuple[int, int]]):
    place = Topology.parse(name)
    shares = list(share_chips(place))
    assert [tuple(len(part.devices) for part in pair) for pair in shares] == sizes
    for pair in shares:
        assert sorted(device for part in pair for device in part.devices) == list(range(place.num_devices))
        assert all(len(part.devices) == part.topology.num_devices for part in pair)


def test_neighbours_of_a_cut_slice_are_neighbours_in_the_whole():
    """Check that devices along an axis of a part are next to each other in the slice, without wrap-around."""
    place = Topology.parse("v5p:4x4x8")
    for part in next(iter(share_chips(place))):
        for number, device in enumerate(part.devices):
            own = part.topology.coords(number)[1]
            for axis in range(3):
                if own[axis] + 1 < part.topology.shape[axis]:
                    next_own = [at + (place_ == axis) for place_, at in enumerate(own)]
                    other = part.devices[part.topology.device_at(0, tuple(next_own))]
                    here, there = place.coords(device)[1], place.coords(other)[1]
                    assert sum(abs(a - b) for a, b in zip(here, there, strict=True)) == 1


@pytest.mark.parametrize("config", ["hf:qwen2.5-7b", "hf:mixtral-8x7b", "hf:gpt2", "hf:deepseek-v3", "hf:gemma2-9b"])
def test_shapes_of_weights_are_those_of_the_decoder(config: str):
    decoder = config_decoder(config)
    assert decoder is not None
    shapes = weight_shapes(read_config(config.removeprefix("hf:"))[1], decoder)
    total = sum(count * math.prod(shape) for shape, count in shapes.values())
    # Counts leave biases, positions and norms of one kind out, and contain layers that look ahead.
    ahead = decoder.params - dataclasses.replace(decoder, ahead=0).params
    assert total == pytest.approx(decoder.params - ahead, rel=1e-2)


@pytest.mark.heavy
@pytest.mark.parametrize("config", ["llama-tiny", "gemma2-tiny", "gpt2-tiny"])
def test_shapes_of_weights_are_those_of_transformers(config: str):
    import torch
    import transformers

    fields = read_config(config)[1]
    decoder = config_decoder(f"hf:{config}")
    assert decoder is not None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**{key: value for key, value in fields.items() if key != "architectures"})
        )
    theirs = {name: tuple(value.shape) for name, value in model.named_parameters()}
    found = {}
    for name, (shape, count) in weight_shapes(fields, decoder).items():
        found |= {name.replace("*", str(number)): shape for number in range(count)}
    assert found == theirs


def test_each_device_of_a_sampler_receives_its_part_of_the_weights():
    plan = plan_rl("hf:qwen2.5-7b", "h100:8*2", dataclasses.replace(WORK, staleness=1))
    (way,) = [w for w in plan.ways if w.mode == "one off" and w.sampler.topology.name == w.trainer.topology.name][:1]
    whole = sum(2 * count * math.prod(shape) for shape, count in weight_shapes(QWEN.fields, QWEN.decoder).values())
    assert way.move.whole_bytes == whole
    assert max(way.move.received_bytes) == pytest.approx(way.sampler.weight_bytes, rel=1e-2)
    assert sum(map(bool, way.move.received_bytes)) == 8
    assert way.move.seconds > max(way.move.received_bytes) / H100.chip.link_oneway_bytes_per_s


def test_zero_3_gathers_in_place_what_others_store():
    """Count the move in place from parameters split over 16 GPUs to engines of two islands."""
    work = dataclasses.replace(WORK, framework="torchtitan")
    trainer = best_trainer(QWEN, H100, work)
    stage = dataclasses.replace(trainer.stages[0], mesh={"dp": 16, "tp": 1}, sharded=("dp",))
    trainer = dataclasses.replace(trainer, stages=(stage,))
    (sampler,) = [each for each in samplers(QWEN, H100, work) if each.engine.devices == 1]
    part = whole_part(H100)
    move = predict_move(QWEN, H100, (trainer, sampler), (part, part), "bf16")
    # Each GPU stores a sixteenth, and each island a half.
    assert max(move.received_bytes) == pytest.approx(15 / 16 * move.whole_bytes, rel=1e-2)
    assert move.entering_bytes == pytest.approx((move.whole_bytes / 2,) * 2, rel=1e-2)
    half = predict_move(QWEN, H100, (trainer, sampler), (part, part), "fp8")
    ends = 2 * QWEN.decoder.vocabulary * QWEN.decoder.width
    assert half.whole_bytes == pytest.approx(move.whole_bytes / 2 + ends, rel=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 8), (2, 2, 4), (1, 4, 2), (4, 2, 1)])
def test_weights_of_stages_and_experts_move_once(tp: int, pp: int, ep: int):
    """Count the weights of a mixture whose stages and experts are on different GPUs than the sampler."""
    work = RlWorkload(64, 100, 100, 100)
    model, whole = rl_model("hf:mixtral-8x7b", work), Topology.parse("h100:8*4")
    training, sampling = next(pair[::-1] for pair in share_chips(whole) if len(pair[0].devices) == 16)
    run = GpuRun(model.decoder, training.topology, "megatron-core", 200, 16 // tp // pp, tp, pp, 1, 4, 1, "none", ep=ep)
    trainer = dataclasses.replace(best_trainer(QWEN, H100, WORK), stages=eager_stages(run))
    shapes = weight_shapes(model.fields, model.decoder)
    for sampler in samplers(model, sampling.topology, work):
        move = predict_move(model, whole, (trainer, sampler), (training, sampling), "bf16")
        assert move.whole_bytes == sum(2 * count * math.prod(shape) for shape, count in shapes.values())
        received = [move.received_bytes[device] for device in sampling.devices]
        assert received == [pytest.approx(sampler.weight_bytes, rel=1e-2)] * 16
        assert sum(move.received_bytes) == sum(received)
        # Both islands of the sampler need all weights, unless an engine has devices of both. Its two islands then share
        # all but attention, which groups repeat.
        needed = sum(move.entering_bytes) / move.whole_bytes
        assert 0.98 < needed < 1.06 if sampler.engine.devices == 16 else needed == pytest.approx(2)
        assert sum(move.leaving_bytes) == pytest.approx(move.whole_bytes)


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(shlex.split(line))
    return code, *capsys.readouterr()


LINE = "rl-plan --quiet hf:qwen2.5-7b --topology h100:8*2 --sequences 256 --prompt 500 --answer 1000 --longest 4000"


def test_the_report_names_ways_degrees_and_commands(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(f"{LINE} --answers 8", capsys)
    assert code == 0
    plan = plan_rl("hf:qwen2.5-7b", "h100:8*2", dataclasses.replace(WORK, staleness=1))
    best = plan.ways[0]
    assert best.trainer.words in out and "vllm serve MODEL" in out and "autoshard degrees hf:qwen2.5-7b" in out
    assert "in turn" in out and "one off" in out and "By closed form" in out
    text, longest = " ".join(out.split()), plan.work.prompt + plan.work.longest
    assert f"{best.sampler.seats * best.sampler.engine.attention} sequences at a time" in text
    assert f"{best.trainer.words}, the fastest with room for a sequence of {longest} tokens" in text


def test_the_command_for_the_trainer_runs_as_printed(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(f"{LINE.replace('h100:8*2', 'h100:8*4')} --answers 8", capsys)
    (line,) = (each for each in out.splitlines() if each.startswith("autoshard degrees"))
    assert run(shlex.join(shlex.split(line)[1:]), capsys)[0] == 0


def test_json_has_all_ways(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(f"{LINE} --reference --staleness 0 --json", capsys)
    found = json.loads(out)
    assert code == 0 and found["scores"] == 2 and found["tokens"] == 256 * 1500
    assert all(way["staleness"] == 0 for way in found["ways"])
    first = found["ways"][0]
    assert first["step_s"] == pytest.approx(
        sum(first[name] for name in ("sample_s", "score_s", "train_s", "move_s", "offload_s"))
    )
    assert first["tokens_per_s"] == pytest.approx(found["tokens"] / first["step_s"])


@pytest.mark.full
def test_the_command_for_a_trainer_on_tpus_plans_its_step(capsys: pytest.CaptureFixture[str]):
    line = "rl-plan hf:llama-tiny --topology v5e:2x4 --sequences 64 --prompt 40 --answer 40 --quiet --json"
    code, out, _ = run(line, capsys)
    found = json.loads(out)
    assert code == 0
    command, place = found["commands"][-1], found["ways"][0]["trainer_topology"]
    assert command.startswith(f"autoshard plan hf:llama-tiny --topology {place} --train --batch 64 --seq 80 --mesh ")
    code, out, _ = run(f"{command.removeprefix('autoshard ')} --quiet --json", capsys)
    planned, way = json.loads(out), found["ways"][0]
    assert code == 0 and planned["topology"] == place and planned["mesh"]["data"] == way["degrees"]["data"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--longest 500", "--longest 500 is below the mean of --answer 1000"),
        ("--updates 3", "--updates 3 does not divide the 256 sequences"),
        ("--answers 7", "--answers 7 does not divide the 256 sequences"),
        ("--longest 40000", "has 32768 positions, and a prompt of 500 tokens with an answer of 40000 needs 40500"),
        ("--topology cpu:8", "cpu:8 has no accelerators"),
        (
            "--topology v5p:2x2x2 --framework torchtitan",
            "--framework torchtitan has no prices for hf:qwen2.5-7b on v5p",
        ),
        ("--topology h100:3x3", "h100 has no shape 3x3"),
        ("--topology h100:1", "nothing fits h100:1: the least that a plan needs is"),
        ("--sequences 0", "--sequences"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change: str, message: str, capsys: pytest.CaptureFixture[str]):
    code, out, error = run(f"{LINE} {change}", capsys)
    assert code == 2 and not out
    assert message in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("model.py", "for a configuration, hf:CONFIG; found 'model.py'"),
        ("hf:bert-large", "hf:bert-large is no decoder that can be counted"),
        ("hf:nothing", "nothing"),
    ],
)
def test_other_programs_are_refused(program: str, message: str, capsys: pytest.CaptureFixture[str]):
    code, _, error = run(LINE.replace("hf:qwen2.5-7b", program), capsys)
    assert code == 2 and message in error


def test_answers_that_never_fit_are_refused():
    work = RlWorkload(8, 1000, 100_000, 130_000)
    with pytest.raises(UserError, match="have room for a sequence of 131000 tokens|nothing fits|nothing that trains"):
        plan_rl("hf:llama3.1-8b", "h100:2", work)
