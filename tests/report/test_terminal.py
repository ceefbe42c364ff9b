"""The terminal report: it shows the plan's content in every width, and is safe with any name."""

import dataclasses
import io
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import autoshard
from autoshard.base.units import format_bytes, format_seconds
from autoshard.exec import CompileReport, Estimate, Unforeseen, Verdict, compiled_plan
from autoshard.exec.ahead.compile_plans import compile_notes
from autoshard.planning import Call, Plan
from autoshard.planning.record.plan_parts import UNSOLVED, MeshTried, TimeError
from autoshard.report import terminal_report
from autoshard.report.display import fold
from autoshard.report.figures import recipe_line, remat_words
from autoshard.report.terminal.compute_limits import compute_limits
from autoshard.report.terminal.explanation_report import cause_text


def rendered(plan: Plan, width: int = 80, color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, color_system="truecolor" if color else None)
    console.print(terminal_report(plan, {"trace": 1.25}))
    return stream.getvalue()


def test_the_verdict_comes_first(plan: Plan):
    lines = rendered(plan, 120).splitlines()
    assert lines[0].rstrip() == "llama3-8b on v5p:4x8x8 (256 devices), mesh data=32, model=8"
    assert lines[2].rstrip() == "FITS: 41.00 GiB of 95.70 GiB a device (43%)"
    assert lines[3].startswith("STEP: 3.22 s (no run like this one is known), MFU 61.6%; 1.03x the speed of the best ")


def test_a_baseline_within_the_error_of_ratios_counts_as_equal(plan: Plan):
    known = dataclasses.replace(plan, time_error=TimeError(-0.05, 0.2, 31, 0.09))
    step = next(line for line in rendered(known, 200).splitlines() if line.startswith("STEP"))
    assert step.startswith(
        "STEP: 3.22 s (-5 % to +20 %, from 31 runs like it), MFU 61.6%; as fast as the best baseline"
    )
    assert "fsdp x tp" in step and "(1.03x, where ratios may be 9% wrong)" in step
    narrow = dataclasses.replace(plan, time_error=TimeError(-0.05, 0.2, 31, 0.01))
    assert "1.03x the speed of the best baseline" in rendered(narrow, 200)


def with_compiled(plan: Plan, step_s: float, gib: int) -> Plan:
    timed = Estimate(step_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {}, {}, 0, ())
    report = CompileReport(
        Verdict.FITS, 0, None, plan.prediction.peak_bytes, gib * 2**30, gib * 2**30, {}, {}, 0, {}, {}, {}, (), (),
        plan.prediction.step_time_s, timed, None, 1.0, "", (),
    )  # fmt: skip
    return compiled_plan(plan, report)


def test_equal_unforeseen_collectives_share_a_line(plan: Plan):
    row = Unforeseen("all-reduce", ("model",), 63 * 2**20, 0.1, 1, "dot_general", "my.py:17", "", "")
    other = dataclasses.replace(row, line="my.py:18")
    empty = dict.fromkeys(field.name for field in dataclasses.fields(CompileReport))
    rows = {"unforeseen": (row, other, *[row] * 8), "warnings": ("a warning",)}
    assert compile_notes(CompileReport(**{**empty, **rows})) == [
        "Unforeseen: 9 x all-reduce over model, 63.00 MiB (10% of all): dot_general at my.py:17",
        "Unforeseen: all-reduce over model, 63.00 MiB (10% of all): dot_general at my.py:18",
        "a warning",
    ]
    many = tuple(dataclasses.replace(row, op=f"collective-permute.{number}", wire_bytes=2) for number in range(11))
    *shown, last = compile_notes(CompileReport(**{**empty, "unforeseen": many, "warnings": ()}))
    assert len(shown) == 8 and last == "Unforeseen: 3 more, 6 B in all"


@pytest.mark.parametrize(("step_s", "gib"), [(3.3, 42), (29.0, 42), (0.5, 42), (3.3, 80), (29.0, 20)])
def test_a_compiled_program_that_differs_much_stands_in_the_verdict(plan: Plan, step_s: float, gib: int):
    text = rendered(with_compiled(plan, step_s, gib), 160)
    fits, step = text.splitlines()[2:4]
    assert fits.startswith(f"FITS: {gib}.00 GiB of 95.70 GiB a device")
    assert ("where 41.00 GiB was predicted, off by a factor" in fits) == (gib != 42)
    if step_s == 3.3:
        assert step.startswith("STEP: 3.22 s (no run like this one is known), MFU 61.6%; 1.03x the speed of the best")
    else:
        factor = max(step_s / 3.22, 3.22 / step_s)
        assert step.startswith(f"STEP: {format_seconds(step_s)} +- ")
        assert "% as compiled, where 3.22 s was predicted, off by a factor" in step
        assert step.rstrip().endswith(f"factor {factor:.1f}; not compared with baselines")
    assert "\nStep time, as predicted" in text and "\nBaselines, as predicted" in text


def test_a_prediction_within_the_error_of_the_estimate_is_undecided(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    counted = dataclasses.replace(plan, provenance=plan.provenance | {"tokens": 524288})
    monkeypatch.setattr(Estimate, "error", property(lambda timed: 0.86))
    step = rendered(with_compiled(counted, 4.47, 41), 300).splitlines()[3]
    assert step.startswith("STEP: 3.22 s (no run like this one is known) as predicted, 4.47 s +- 86% as compiled: ")
    assert "undecided, they differ by less than the estimate's error, 163 k tokens/s (636 a device) as pred" in step
    monkeypatch.setattr(Estimate, "error", property(lambda timed: 0.1))
    step = rendered(with_compiled(counted, 4.47, 41), 300).splitlines()[3]
    assert "off by a factor 1.4, 117 k tokens/s (458 a device) as compiled; not compared" in step


def test_tokens_a_second_stand_with_the_step(plan: Plan):
    counted = dataclasses.replace(plan, provenance=plan.provenance | {"tokens": 524288})
    assert (
        rendered(counted, 120)
        .splitlines()[3]
        .startswith("STEP: 3.22 s (no run like this one is known), 163 k tokens/s (636 a device), MFU 61.6%")
    )
    assert counted.tokens_per_s == pytest.approx(524288 / 3.22)


def test_the_recipe_stands_below_the_step(plan: Plan):
    line = rendered(plan, 160).splitlines()[4]
    assert line.rstrip() == "RECIPE: stored in bfloat16"
    products = dataclasses.replace(plan, provenance=plan.provenance | {"computes_in": "float8_e4m3fn"})
    assert recipe_line(products) == "float8_e4m3fn, stored in bfloat16"
    rounded = dataclasses.replace(
        plan, provenance=plan.provenance | {"computes_in": "float32", "multiplies_in": "bfloat16"}
    )
    assert recipe_line(rounded) == "float32 (bfloat16 in matmuls), stored in bfloat16"
    options = {"source": {"program": "hf:llama3-8b", "options": {"remat": "dots", "microbatches": 4}}}
    stated = dataclasses.replace(plan, provenance=plan.provenance | options)
    assert recipe_line(stated).startswith("remat dots, microbatches 4, bfloat16, stored in bfloat16")
    assert recipe_line(stated).endswith("stored in bfloat16, batch 64 (default)")
    assert remat_words("dots:27+none") == "dots in 27 layers, then none" and remat_words("mine") == "mine"
    options["source"]["options"]["lora"] = "r=16,base=nf4"
    weights = [name for name, role in plan.roles.items() if role == "parameter"]
    kept = max(weights, key=lambda name: math.prod(plan.shapes[name]))
    stored = dataclasses.replace(
        stated,
        roles={**plan.roles, **dict.fromkeys(weights, "frozen")},
        dtypes={**plan.dtypes, **{name: "int8" for name in weights if name != kept}},
    )
    assert "LoRA r=16,base=nf4" in recipe_line(stored)
    assert "frozen parameters nf4" in recipe_line(stored), "most bytes count, not the largest tensor"
    options["source"]["options"]["batch"] = 64
    assert "default" not in recipe_line(dataclasses.replace(plan, provenance=plan.provenance | options))
    call = Call(0, "splash_mha_fwd", (), (), ())
    assert recipe_line(dataclasses.replace(stated, calls=(call,))).startswith("splash attention, remat dots")


def test_the_recipe_of_a_torch_file_has_its_optimizer_and_dtype(plan: Plan):
    source = {"source": {"program": "model.py", "options": {"train": True}}}
    assert recipe_line(dataclasses.replace(plan, provenance=plan.provenance | source)) == (
        "remat none since it fits, and recomputing spares little (--remat auto looks for faster recipes), adamw, "
        "bfloat16, stored in bfloat16"
    )


def test_long_lists_of_names_in_other_recipes_are_counted(plan: Plan):
    policy = "full,keep=q_proj/k_proj/v_proj,offload=o_proj/up_proj:30+none"
    row = {"verdict": "", "step_time_s": 1.0, "peak_bytes": 1, "bound_s": None, "frontier": False}
    rows = [row | {"choices": {"remat": each}} for each in ("none", policy)]
    recipe = {"chosen": {"remat": "none"}, "tried": rows}
    text = rendered(dataclasses.replace(plan, provenance=plan.provenance | {"recipe": recipe}), 120)
    assert "remat full,keep=3 values,offload=o_proj/up_proj:30+none " in text


def test_a_plan_that_does_not_fit_says_so(plan: Plan):
    tight = dataclasses.replace(
        plan, memory_limit_bytes=2**35, prediction=dataclasses.replace(plan.prediction, fits=False)
    )
    text = " ".join(rendered(tight).split())
    assert "DOES NOT FIT: 41.00 GiB of 32.00 GiB a device (128%)" in text
    assert "9.00 GiB is missing." in text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_every_figure_is_there_in_full(plan: Plan, width: int):
    text = rendered(plan, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for prediction in (plan.prediction, *plan.baselines.values()):
        row = [
            format_seconds(prediction.step_time_s),
            format_seconds(prediction.compute_s),
            format_seconds(prediction.exposed_comm_s),
            format_bytes(prediction.peak_bytes),
            "yes" if prediction.fits else "no",
        ]
        assert any(
            all(figure in line.split("  ") or f" {figure}" in line for figure in row) for line in text.splitlines()
        )
    for collective in plan.prediction.collectives:
        (line,) = (line for line in text.splitlines() if line.startswith(f"  {collective.kind} "))
        assert format_bytes(collective.wire_bytes) in line
        assert (format_seconds(collective.waited_s) if collective.waited_s else "hidden") in line
    for line in plan.words:
        assert line in text


def test_bars_are_drawn_to_scale(plan: Plan):
    lines = rendered(plan).splitlines()
    bar = lines[lines.index("Step time") + 1]
    share = bar.count("▒") / (bar.count("█") + bar.count("▒"))
    assert share == pytest.approx(plan.prediction.exposed_comm_s / plan.prediction.step_time_s, abs=0.02)


def test_baselines_that_fit_come_first_and_faster_before_slower(plan: Plan):
    text = rendered(plan, 120)
    order = ["fsdp x tp, sequence ", "fsdp  ", "fsdp x tp  ", "tensor parallel ", "data parallel "]
    places = [text.index(f"\n  {name}") for name in order]
    assert all(a < b for a, b in itertools.pairwise(places))


def test_faster_baselines_that_a_form_cannot_hold_are_said_so(plan: Plan):
    facts = {"for": "dtensor", "not_held": ["fsdp"]}
    faster = dataclasses.replace(plan.baselines["fsdp"], step_time_s=plan.prediction.step_time_s / 2, fits=True)
    copy = dataclasses.replace(
        plan, provenance={**plan.provenance, **facts}, baselines={**plan.baselines, "fsdp": faster}
    )
    text = " ".join(rendered(copy, 120).split())
    assert "the best baseline that fits, fsdp, with splits that the dtensor form cannot state" in text
    assert " fsdp is priced with splits of single tensors and values that the dtensor form cannot state " in text
    assert "cannot state" not in rendered(plan, 120)


def test_repeated_layers_are_one_row(plan: Plan):
    unrolled = {
        f"{name.replace('*', str(layer))}": value
        for name, value in plan.arguments.items()
        for layer in (range(4) if "*" in name else (0,))
    }
    old = {name.replace("*", str(layer)): name for name in plan.arguments for layer in range(4)}
    copy = dataclasses.replace(
        plan,
        arguments=unrolled,
        shapes={name: plan.shapes[old[name]] for name in unrolled},
        dtypes={name: plan.dtypes[old[name]] for name in unrolled},
        roles={name: plan.roles[old[name]] for name in unrolled},
    )
    text = rendered(copy, 120)
    (row,) = (line for line in text.splitlines() if "up_proj.weight  " in line and "/data" in line)
    assert "model.layers.*.mlp.up_proj.weight" in row
    assert "4 tensors of 32 x 14336/model x 4096/data" in row
    assert "56.00 MiB, 1/256" in row


def test_numbers_at_the_end_of_words_count_layers_from_three_on():
    layers = {f"params.h{i}.{name}": None for i in range(12) for name in ("fc1", "fc2")}
    ends = {"ln1": None, "ln2": None, "h_0": None, "params.h12.fc1": None}
    shown = {name: len(members) for name, members in fold({**layers, **ends})}
    assert shown == {"params.h*.fc1": 13, "params.h*.fc2": 12, "ln1": 1, "ln2": 1, "h_0": 1}
    assert [name for name, _ in fold([f"b{i}.w" for i in range(3)], key=lambda name: name)] == ["b0.w", "b1.w", "b2.w"]


def test_meshes_of_a_plan_for_a_form_are_compared_without_it(plan: Plan):
    meshes = (MeshTried("data=32,model=8", "", 3.1, 3.0, "chosen"), MeshTried("data=256", "", 3.3, 3.2, "6.5% slower"))
    provenance = {**plan.provenance, "for": "flax"}
    text = " ".join(rendered(dataclasses.replace(plan, meshes=meshes, provenance=provenance)).split())
    assert "6.5% slower These are plans without the flax form, in which the chosen mesh takes 3.1 s." in text
    assert "without the" not in " ".join(rendered(dataclasses.replace(plan, meshes=meshes)).split())


def test_meshes_that_are_not_solved_share_a_line(plan: Plan):
    solved = MeshTried("data=4,model=4", "", 1.0, 0.9, "12.0% slower")
    large = [MeshTried(f"data={n},model=4", "", None, 1e-3 * n, f"{UNSOLVED}: {n} M pairs") for n in (2, 3)]
    chosen = MeshTried("data=32,model=8", "", 1.0, 0.9, "chosen")
    for others in ([solved, *large], large):
        text = " ".join(rendered(dataclasses.replace(plan, meshes=(chosen, *others))).split())
        assert text.count(UNSOLVED) == 1 and "data=2,model=4; data=3,model=4" in text and "at least 2 ms" in text
        assert ("12.0% slower" in text) == (solved in others)


def test_no_colour_codes_when_piped_and_some_on_a_terminal(plan: Plan):
    assert "\x1b" not in rendered(plan)
    assert "\x1b[" in rendered(plan, color=True)


@pytest.mark.parametrize(
    "name", ["[red]x[/red]", "</closing>[/]", "\x1b[2J\x07wiped", "‮reversed", "w" * 5000, "a\nb", "{}%s"]
)
def test_a_hostile_name_does_no_harm(plan: Plan, name: str):
    (own, *_) = plan.arguments

    def renamed(table: dict) -> dict:
        return {name if key == own else key: value for key, value in table.items()}

    hostile = dataclasses.replace(
        plan,
        program_name=name,
        arguments=renamed(plan.arguments),
        shapes=renamed(plan.shapes),
        dtypes=renamed(plan.dtypes),
        roles=renamed(plan.roles),
        warnings=(name,),
        words=(name[:70],),
    )
    text = rendered(hostile)
    assert not set(text) & set("\x1b\x07‮")
    assert len(text.splitlines()) < len(rendered(plan).splitlines()) + 70
    if name.startswith("["):
        assert f"{name} on v5p" in text


def test_a_plan_with_nothing_to_tell_is_still_a_report(plan: Plan):
    bare = dataclasses.replace(
        plan,
        arguments={},
        shapes={},
        dtypes={},
        roles={},
        words=(),
        warnings=(),
        baselines={},
        prediction=dataclasses.replace(
            plan.prediction, step_time_s=0.0, compute_s=0.0, exposed_comm_s=0.0, memory={}, collectives=(), mfu=None
        ),
    )
    assert "no baseline to compare with" in rendered(bare)


def test_a_sum_for_a_parameter_or_its_state_is_one_of_its_gradient(plan: Plan):
    names = ["params.up", "state.mu.up", "x"]
    named = dataclasses.replace(
        plan,
        shapes={"params.up": (8, 4), "state.mu.up": (8, 4), "x": (2, 8)},
        roles=dict(zip(names, ("parameter", "optimizer_state", "batch"), strict=True)),
    )
    first = plan.prediction.collectives[0]
    texts = {
        kind: [cause_text(named, dataclasses.replace(first, kind=kind, cause=name)) for name in names]
        for kind in ("reduce-scatter", "all-gather")
    }
    assert texts["reduce-scatter"] == ["gradient of params.up", "gradient of params.up", "x"]
    assert texts["all-gather"] == names


@pytest.mark.parametrize(("remat", "loop"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_recipe_of_a_step_of_ones_own_is_found_in_it(remat: bool, loop: bool):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(w, x):
        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, w)[0].mean()

    def step(w, x):
        if not loop:
            return w - jax.grad(loss)(w, x)
        return (
            w - jax.lax.scan(lambda sums, part: (sums + jax.grad(loss)(w, part), None), 0 * w, x.reshape(2, 8, 16))[0]
        )

    args = (jax.ShapeDtypeStruct((3, 16, 16), "float32"), jax.ShapeDtypeStruct((16, 16), "float32"))
    line = recipe_line(autoshard.plan(autoshard.trace(step, args), topology="cpu:2"))
    assert ("values recomputed" in line, "gradients in a loop" in line) == (remat, loop), line


def test_a_softmax_of_several_lines_is_named_with_the_kernel_that_would_save_its_passes():
    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
        shares = jax.nn.softmax(scores, -1).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", shares, v)

    heads = jax.ShapeDtypeStruct((8, 2048, 8, 128), jnp.bfloat16)
    made = autoshard.plan(autoshard.trace(attended, (heads, heads, heads)), topology="v6e:2x2", mesh="data=4")
    line = attended.__code__.co_firstlineno + 3
    (limit,) = [each for each in compute_limits(made) if each.startswith("The softmax at ")]
    assert f"test_terminal.py:{line} stores its scores in memory" in limit
    assert "block_sizes of 1024" in limit
    passes = sum(op.compute_s for op in made.ops if op.scores and op.bound == "memory")
    assert f"about {format_seconds(passes)} (" in limit
