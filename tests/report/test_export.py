"""Exported plans run, and have the plan's shardings."""

import ast
import dataclasses
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AbstractMesh, NamedSharding

import autoshard
from autoshard import UserError
from autoshard.base.units import format_seconds
from autoshard.errors import FormError
from autoshard.exec import jax_mesh
from autoshard.exports import export_plan, make_export, plan_exports
from autoshard.exports.maxtext_settings import maxtext_text
from autoshard.planning import FORMS, Pin, Plan, Spec, dims_by_axis, hlo_sharding, layer_pattern
from tests import forked


MESH = {"data": 4, "model": 2}


@pytest.fixture
def small(plan: Plan) -> Plan:
    """The parameters of a module with two layers, on eight devices in another order."""
    tensors = {
        "embed.weight": ((64, 32), Spec((("model",), ("data",)))),
        "layers.*.up.weight": ((2, 64, 32), Spec(((), ("data", "model"), ()))),
        "layers.*.up.bias": ((2, 64), Spec(((), ()))),
        "head.weight": ((64, 32), Spec(((), ("model", "data")))),
    }
    arguments = {name: spec for name, (_, spec) in tensors.items()}
    return dataclasses.replace(
        plan,
        topology="cpu:8",
        mesh=MESH,
        device_order=(0, 2, 4, 6, 1, 3, 5, 7),
        arguments=arguments,
        results=arguments,
        shapes={name: shape for name, (shape, _) in tensors.items()},
        dtypes=dict.fromkeys(tensors, "float32"),
        roles=dict.fromkeys(tensors, "parameter"),
        pins=(Pin(3, 0, Spec((("data",),))),),
    )


MODULE = """
import torch


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 64)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(32, 64, bias=False)
"""


def run(code: str, folder: Path, **env: str) -> Any:
    (folder / "model.py").write_text(MODULE)
    (folder / "run.py").write_text(code)
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | env
    result = forked.run(["run.py"], folder, environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_jax_gives_the_plans_own_mesh_and_shardings(small: Plan):
    names: dict[str, Any] = {}
    exec(export_plan(small, "jax"), names)
    mesh = names["make_mesh"]()
    assert mesh == jax_mesh(small)
    assert [device.id for device in mesh.devices.flat] == list(small.device_order)
    for table, specs in (("ARGUMENTS", small.arguments), ("RESULTS", small.results)):
        found = names["shardings"](names[table], mesh)
        assert list(found) == list(specs)
        for name, spec in specs.items():
            assert found[name].is_equivalent_to(NamedSharding(jax_mesh(small), spec.partition_spec()), len(spec.dims))
    value = jax.device_put(np.zeros((64, 32)), names["shardings"](names["ARGUMENTS"], mesh)["embed.weight"])
    assert value.addressable_shards[0].data.shape == (32, 8)


@pytest.mark.heavy
def test_jax_jits_a_step_with_the_plans_shardings(small: Plan):
    in_order = dataclasses.replace(
        small,
        arguments={name: small.arguments[name] for name in sorted(small.arguments)},
        results={name: small.results[name] for name in sorted(small.results)},
    )
    names: dict[str, Any] = {}
    exec(export_plan(in_order, "jax"), names)
    args = ({name: np.ones(shape, np.float32) for name, shape in small.shapes.items()},)
    step = names["jit"](lambda tree: {k: v + 1 for k, v in tree.items()}, args)
    out = step(*args)
    for name, spec in small.arguments.items():
        assert out[name].sharding.is_equivalent_to(
            NamedSharding(jax_mesh(small), spec.partition_spec()), out[name].ndim
        )
        assert float(out[name].min()) == 2.0


def parsed(text: str) -> tuple[tuple[int, ...], list[int], bool]:
    """Return the tile shape, the devices, and True if the last tile dim is for replication."""
    match = re.fullmatch(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?( last_tile_dim_replicate)?\}", text)
    assert match, text
    tile, shape = (tuple(int(n) for n in match[k].split(",")) for k in (1, 2))
    devices = np.arange(np.prod(shape)).reshape(shape)
    if match[3]:
        devices = devices.transpose([int(n) for n in match[3].split(",")])
    return tile, devices.ravel().tolist(), bool(match[4])


@given(st.data())
def test_hlo_strings_mean_what_jax_means(data: st.DataObject):
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    mesh = {f"axis{i}": size for i, size in enumerate(sizes)}
    rank = data.draw(st.integers(1, 4))
    dims: list[tuple[str, ...]] = [() for _ in range(rank)]
    for axis in data.draw(st.permutations(list(mesh))):
        where = data.draw(st.integers(-1, rank - 1))
        if where >= 0:
            dims[where] = (*dims[where], axis)
    spec = Spec(tuple(dims))
    theirs = str(
        NamedSharding(AbstractMesh(tuple(sizes), tuple(mesh)), spec.partition_spec())._to_xla_hlo_sharding(rank)
    )
    ours = hlo_sharding(spec, mesh)
    if "devices" not in theirs or "devices" not in ours:
        assert ours.startswith("{replicated}") and theirs in ("{replicated}", "{maximal device=0}")
    else:
        assert parsed(ours) == parsed(theirs)


def test_hlo_lists_every_argument_and_result(small: Plan):
    lines = export_plan(small, "hlo").splitlines()
    assert "# device assignment (numbers in the topology's order): 0,2,4,6,1,3,5,7" in lines
    assert "argument embed.weight {devices=[2,4]<=[4,2]T(1,0)}" in lines
    assert "result head.weight {devices=[1,8]<=[4,2]T(1,0)}" in lines
    assert "argument layers.*.up.bias {replicated}" in lines


def jax_named(plan: Plan, name: str) -> NamedSharding:
    return NamedSharding(jax_mesh(plan), plan.arguments[name].partition_spec())


def test_hlo_strings_place_arrays_as_the_plan_does(small: Plan):
    text = export_plan(small, "hlo")
    (order,) = re.findall(r"topology's order\): ([\d,]+)", text)
    devices = tuple(jax.devices()[int(number)] for number in order.split(","))
    for name, string in re.findall(r"^argument (\S+) (\{.*\})$", text, re.MULTILINE):
        value = np.arange(np.prod(small.shapes[name]), dtype=np.float32).reshape(small.shapes[name])
        parsed = type(jax_named(small, name)._to_xla_hlo_sharding(value.ndim)).from_string(string)
        theirs = jax.device_put(value, GSPMDSharding(devices, parsed))
        ours = jax.device_put(value, jax_named(small, name))
        held = {shard.device.id: np.asarray(shard.data) for shard in theirs.addressable_shards}
        assert set(held) == set(range(8))
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(held[shard.device.id], shard.data)


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("torch_xla") is None, reason="the extra `xla` installs it")
def test_torch_xla_marks_every_parameter(small: Plan, tmp_path: Path):
    code = (
        export_plan(small, "torch-xla")
        + """
import json
import torch_xla
import torch_xla.runtime as xr
from model import Model

xr.use_spmd()
model = Model().to("xla")
mark(model, make_mesh())
found = {name: torch_xla._XLAC._get_xla_sharding_spec(p) for name, p in model.named_parameters()}
print(json.dumps(found))
"""
    )
    found = run(code, tmp_path, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
    assert set(found) == {
        *("embed.weight", "head.weight"),
        *(f"layers.{layer}.up.{kind}" for layer in range(2) for kind in ("weight", "bias")),
    }
    assert found["layers.0.up.bias"] == "{replicated}"
    order = ",".join(map(str, small.device_order))
    assert found["layers.1.up.weight"] == f"{{devices=[8,1]{order}}}"
    grid = np.array(small.device_order).reshape(4, 2)
    assert found["embed.weight"] == f"{{devices=[2,4]{','.join(map(str, grid.T.ravel()))}}}"
    assert found["head.weight"] == f"{{devices=[1,8]{','.join(map(str, grid.T.ravel()))}}}"


@pytest.mark.heavy
def test_dtensor_splits_every_parameter(small: Plan, tmp_path: Path):
    code = (
        export_plan(small, "dtensor")
        + """
import json
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from model import Model

torch.distributed.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
model = Model()
distribute(model, make_mesh("cpu"))
print(json.dumps({n: [str(p.placements), list(p.to_local().shape)] for n, p in model.named_parameters()}))
"""
    )
    found = run(code, tmp_path)
    assert found["embed.weight"] == ["(Shard(dim=1), Shard(dim=0))", [32, 8]]
    assert found["layers.1.up.weight"] == ["(Shard(dim=0), Shard(dim=0))", [8, 32]]
    assert found["layers.0.up.bias"] == ["(Replicate(), Replicate())", [64]]
    assert found["head.weight"] == ["(Replicate(), Replicate())", [64, 32]]


def test_what_dtensor_cannot_express_is_reported(small: Plan):
    text = export_plan(small, "dtensor")
    assert dims_by_axis(small.arguments["head.weight"], MESH) is None
    lacking = [line for line in text.splitlines() if line.startswith("# Not expressed here: ")]
    assert len(lacking) == 5
    assert "functions that DTensor cannot split" in text
    assert "head.weight: * x */model/data splits a dim by axes in another order than the mesh" in text
    assert "the 1 intermediates that the plan pins" in text
    assert "the device order" in text


def test_flax_rules_turn_names_into_the_plans_specs(small: Plan):
    from flax.linen import logical_axis_rules
    from flax.linen.spmd import logical_to_mesh_axes

    names: dict[str, Any] = {}
    exec(export_plan(small, "flax"), names)
    for name, spec in names["partition_specs"]().items():
        expected = NamedSharding(jax_mesh(small), small.arguments[name].partition_spec())
        assert NamedSharding(jax_mesh(small), spec).is_equivalent_to(expected, len(small.shapes[name])), name
    with logical_axis_rules(names["RULES"]):
        for name, axes in names["LOGICAL_AXES"].items():
            sharding = NamedSharding(jax_mesh(small), logical_to_mesh_axes(axes))
            expected = NamedSharding(jax_mesh(small), small.arguments[name].partition_spec())
            assert sharding.is_equivalent_to(expected, len(axes)), name


@pytest.mark.parametrize(
    ("topology", "mesh", "settings"),
    [
        ("v5p:4x8x8", {"data": 32, "model": 8}, {"ici_fsdp": 32, "ici_tensor": 8}),
        ("v5e:16x16*2", {"data": 64, "model": 8}, {"dcn_fsdp": 2, "ici_fsdp": 32, "ici_tensor": 8}),
        ("v5e:4x4*3", {"model": 16, "data": 3}, {"ici_tensor": 16, "dcn_fsdp": 3}),
        ("v5e:4x4*4", {"data": 2, "model": 32}, {"dcn_fsdp": 2, "dcn_tensor": 2, "ici_tensor": 16}),
        # Sizes and slices share factors, but neither divides the other.
        (
            "v5e:4x4*6",
            {"data": 4, "model": 24},
            {"dcn_fsdp": 2, "ici_fsdp": 2, "dcn_tensor": 3, "ici_tensor": 8},
        ),
        (
            "v5e:4x4*6",
            {"data": 4, "model": 8, "rest": 3},
            {"dcn_fsdp": 2, "ici_fsdp": 2, "ici_tensor": 8, "dcn_tensor": 3},
        ),
        ("v5e:4x4*2", {"data": 1, "model": 32}, {"dcn_tensor": 2, "ici_tensor": 16}),
    ],
)
def test_maxtext_settings_multiply_to_the_devices(plan: Plan, topology: str, mesh: dict, settings: dict):
    arguments = plan.arguments | {"input_ids": Spec((("data",), ()))}
    text = export_plan(dataclasses.replace(plan, topology=topology, mesh=mesh, arguments=arguments), "maxtext")
    found = {key: int(value) for key, value in re.findall(r"^(\w+)_parallelism: (\d+)$", text, re.MULTILINE)}
    assert found == settings
    assert np.prod(list(found.values())) == np.prod(list(mesh.values()))


@pytest.mark.parametrize(
    ("roles", "use"),
    [
        (("experts",), "expert"),
        (("ffn", "heads", "sequence"), "tensor"),
        (("vocabulary", "sequence"), "context"),
        (("batch",), "fsdp"),
    ],
)
def test_maxtext_names_what_an_axis_does(plan: Plan, roles: tuple[str, ...], use: str):
    text = export_plan(dataclasses.replace(plan, axis_roles={"data": ("batch",), "model": roles}), "maxtext")
    assert f"# model=8 is used as {use} parallelism." in text


@pytest.mark.heavy
@pytest.mark.parametrize(("kv_heads", "fits"), [(8, True), (4, False), (1, False)])
def test_maxtext_refuses_tensor_degrees_that_do_not_divide_heads_of_keys(
    plan: Plan, tmp_path: Path, kv_heads: int, fits: bool
):
    fields = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": kv_heads}
    (tmp_path / "few.json").write_text(json.dumps(fields))
    source = {"source": {"program": f"hf:{tmp_path / 'few.json'}"}}
    sourced = dataclasses.replace(plan, provenance=plan.provenance | source)
    if fits:
        assert "ici_tensor_parallelism: 8" in maxtext_text(sourced, "")
        return
    with pytest.raises(
        FormError, match=f"MaxText splits whole heads of keys, and {kv_heads} cannot be split over 8 devices"
    ):
        maxtext_text(sourced, "")


def test_experts_over_an_axis_in_parts_are_expert_parallelism(tmp_path: Path):
    config = json.loads(Path(autoshard.__file__).with_name("program").joinpath("configs/mixtral-tiny.json").read_text())
    (path := tmp_path / "wide.json").write_text(json.dumps(config | {"num_local_experts": 8}))
    options = {"train": True, "batch": 2, "seq": 64}
    made = autoshard.plan(f"hf:{path}", topology="cpu:8", mesh="model=8", program_options=options)
    assert len(made.mesh) == 2 and all("experts" in roles for roles in made.axis_roles.values())
    assert "ici_expert_parallelism: 8" in export_plan(made, "maxtext")


def recomputing(plan: Plan, remat: str) -> dict[str, str]:
    """Return MaxText's settings for a plan whose layers recompute as `remat` says."""
    made = dataclasses.replace(plan, provenance=plan.provenance | {"recipe": {"chosen": {"remat": remat}}})
    text = export_plan(made, "maxtext")
    settings = dict(re.findall(r"^(\w+): (\w+)$", text, re.MULTILINE))
    return {key: value for key, value in settings.items() if "parallelism" not in key} | {
        "lacks": " ".join(re.findall(r"^# Not expressed here: (.*(?:layers|places).*)$", text, re.MULTILINE))
    }


def test_maxtext_places_every_tensor(plan: Plan):
    settings = recomputing(plan, "full,keep=q_proj/gate_proj,offload=context/input/self_attn.o_proj")
    places = {name: place for name, place in settings.items() if place in ("device", "offload")}
    assert settings["remat_policy"] == "custom" and not settings["lacks"]
    assert places == {
        "query_proj": "device",
        "mlpwi_0": "device",
        "context": "offload",
        "decoder_layer_input": "offload",
        "out_proj": "offload",
    }
    assert {"key_proj", "value_proj", "mlpwi_1", "mlpwo"} <= {name for name in settings if settings[name] == "remat"}
    dots = recomputing(plan, "dots,offload=v_proj")
    assert (dots["value_proj"], dots["mlpwo"], dots["context"]) == ("offload", "device", "remat")


def test_maxtext_says_what_it_cannot_place(plan: Plan):
    assert recomputing(plan, "full") == {"remat_policy": "full", "lacks": ""}
    least = recomputing(plan, "none")
    assert least["remat_policy"] == "minimal_with_context" and "`none` recomputes all" in least["lacks"]
    mixed = recomputing(plan, "full,keep=k_proj:3+dots")
    assert mixed["key_proj"] == "device" and "in the first layers alone" in mixed["lacks"]
    assert "experts.down_proj2" in recomputing(plan, "full,keep=experts.down_proj2")["lacks"]
    assert "remat_policy" not in recomputing(plan, "half of it"), "a choice of the program's own"


OF_MODULES = ("torch-pipelining", "transformers", "torchtitan", "accelerate", "haliax")
"""Forms of plans that need a torch module or names of dims; they have tests of their own."""
OF_ANY = [name for name, form in FORMS.items() if form.text and name not in OF_MODULES]


@pytest.mark.parametrize("form", OF_ANY)
@pytest.mark.parametrize("name", ["a'b\"c", "x\nimport os", "{}", "\\"])
def test_a_hostile_name_stays_a_string(small: Plan, form: str, name: str):
    arguments = {name: Spec((("data",),)), f"batch.{name}": Spec((("data", "model"),))}
    hostile = dataclasses.replace(
        small,
        program_name=name,
        arguments=arguments,
        results=arguments,
        shapes=dict.fromkeys(arguments, (8,)),
        dtypes=dict.fromkeys(arguments, "float32"),
        roles=dict(zip(arguments, ("parameter", "batch"), strict=True)),
    )
    text = export_plan(hostile, form)
    if form in ("jax", "explicit", "flax", "rules", "torch-xla", "dtensor", "fsdp2"):
        compile(text, form, "exec")
    assert "\nimport os" not in text.replace("import jax", "")


def test_an_unknown_form_is_refused(small: Plan):
    with pytest.raises(UserError, match="no export to 'sonnet'; choose from jax, jax-export, explicit, flax, maxtext"):
        export_plan(small, "sonnet")


def test_an_export_that_splits_nothing_is_refused(small: Plan):
    whole = {name: Spec.replicated(len(spec.dims)) for name, spec in small.arguments.items()}
    inside = dataclasses.replace(small, arguments=whole, results=whole)
    with pytest.raises(UserError, match="can express none of the plan's 1 splits, .* --for dtensor"):
        export_plan(inside, "dtensor")
    assert "Replicate()" in export_plan(inside, "dtensor", force=True)
    nothing = dataclasses.replace(inside, pins=())
    assert export_plan(nothing, "dtensor")
    assert export_plan(inside, "maxtext")


def test_dtensor_is_not_reported_to_propagate(small: Plan):
    assert "propagat" not in export_plan(small, "dtensor")
    assert "DTensor splits each op as its operands are" in export_plan(small, "dtensor")
    assert "XLA's propagation chooses them" in export_plan(small, "torch-xla")


def test_the_header_says_what_a_step_takes_with_what_is_stored():
    def step(params: Any, x: Any) -> Any:
        return x @ params["up"] @ params["down"]

    shape = jax.ShapeDtypeStruct
    params = {"up": shape((512, 2048), "float32"), "down": shape((2048, 512), "float32")}
    program = autoshard.trace(step, (params, shape((1024, 512), "float32")))
    whole = {"params.*": "None,None", "x": "None,None"}
    plan = autoshard.plan(program, topology="v5e:2x4", mesh=MESH, pins=whole)
    made = make_export(plan, "torch-xla", program, force=True)
    assert made.prediction is not None and made.prediction.step_time_s > 1.5 * plan.prediction.step_time_s
    second = made.text.splitlines()[1]
    assert second == f"# {made.sentence}"
    assert format_seconds(made.prediction.step_time_s) in second
    assert f"the plan itself: {format_seconds(plan.prediction.step_time_s)}" in second
    assert "are not priced: the plan of step does not say where its program is" in export_plan(plan, "flax", force=True)
    within = autoshard.plan(program, topology="v5e:2x4", mesh=MESH, form="torch-xla")
    assert "(the same as the plan itself)" in export_plan(within, "torch-xla").splitlines()[1]


HOSTILE = "\"'\n__import__('os').abort()\n\r\x0b\x85\u2028#</script>{x}%s\\N{BEL} ''' \"\"\"\\"


def named(plan: Plan, word: str, topology: str) -> Plan:
    """Return a plan all of whose names contain this word."""
    axes = {f"data{word}": 4, f"model{word}": 2}
    data, model = axes
    specs = {f"w{word}": Spec(((data,), (model,))), f"b.*.{word}": Spec(((), (data, model)))}
    flags = {"xla_flags": {"flags": [f"--xla_a={word}"]}, "maxtext": {data: f"fsdp{word}"}}
    return dataclasses.replace(
        plan,
        program_name=f"mine{word}",
        topology=topology,
        mesh=axes,
        device_order=tuple(range(8)),
        arguments=specs,
        results=specs,
        axis_roles=dict.fromkeys(axes, ("batch",)),
        shapes={name: (8, 8) for name in specs},
        dtypes=dict.fromkeys(specs, "float32"),
        roles=dict(zip(specs, ("parameter", "batch"), strict=True)),
        provenance={**flags, "source": {"program": word}},
    )


@pytest.mark.parametrize("form", [form for form in OF_ANY if form not in ("hlo", "maxtext", "rules")])
def test_names_in_code_are_exactly_those_of_the_plan(form: str, plan: Plan):
    hostile = named(plan, HOSTILE, f"cpu:8{HOSTILE}")
    code = ast.parse(export_plan(hostile, form))
    plain = ast.parse(export_plan(named(plan, "", "cpu:8"), form))
    assert [type(node) for node in code.body] == [type(node) for node in plain.body]
    assert [node.name for node in ast.walk(code) if isinstance(node, ast.FunctionDef)] == [
        node.name for node in ast.walk(plain) if isinstance(node, ast.FunctionDef)
    ]
    (mesh,) = [
        node.value for node in code.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MESH"
    ]
    assert ast.literal_eval(mesh) == ({"data": 8} if form == "fsdp2" else hostile.mesh)
    texts = {node.value for node in ast.walk(code) if isinstance(node, ast.Constant)}
    parameter, batch = hostile.arguments
    assert {parameter, layer_pattern(parameter, 8)} & texts and batch in texts


def test_names_in_lines_cannot_begin_a_line(plan: Plan):
    hostile = named(plan, HOSTILE, f"cpu:8{HOSTILE}")
    for line in export_plan(hostile, "hlo").splitlines():
        assert line.startswith(("# ", "argument ", "result "))
    lines = [line for line in export_plan(hostile, "hlo").splitlines() if line.startswith("argument")]
    decoder = json.JSONDecoder()
    assert [decoder.raw_decode(line, len("argument "))[0] for line in lines] == list(hostile.arguments)
    for line in export_plan(named(plan, HOSTILE, "cpu:8"), "maxtext").splitlines():
        assert line.startswith("# ") or re.fullmatch(r"ici_\w+_parallelism: \d", line)


def test_each_way_to_split_has_a_rule_of_its_own(plan: Plan):
    axes = {"a": 2, "b": 2, "a_b": 2}
    specs = {"w": Spec((("a", "b"),)), "v": Spec((("a_b",),))}
    one = dataclasses.replace(named(plan, "", "cpu:8"), mesh=axes, arguments=specs, results=specs)
    text = export_plan(dataclasses.replace(one, roles=dict.fromkeys(specs, "parameter"), shapes={}), "flax", force=True)
    assert "('over_a_b', ('a', 'b'))" in text and "('over_a_b_', 'a_b')" in text


def test_a_form_that_is_slower_than_the_plan_is_refused(small: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    slower = dataclasses.replace(small.prediction, step_time_s=2 * small.prediction.step_time_s)
    monkeypatch.setattr(plan_exports, "_priced", lambda *given: (slower, "Predicted."))
    with pytest.raises(FormError, match="--to jax-export hold it whole.*, repeat `autoshard plan` with --for jax.$"):
        export_plan(small, "jax")
    assert "Predicted." in export_plan(small, "jax", force=True)
    within = dataclasses.replace(small, provenance={**small.provenance, "for": "jax"})
    assert "Predicted." in export_plan(within, "jax")


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["jax", "explicit"])
def test_a_step_with_static_arguments_runs_as_exported(form: str):
    def scaled(count: int, w: Any, x: Any, *, power: int = 1) -> Any:
        return w - 0.1 * jax.grad(lambda w: ((count * (x @ w)) ** 2).mean())(w), power * count

    args = (2, jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((32, 16), "float32"))
    step = jax.jit(scaled, static_argnums=0, static_argnames="power")
    plan = autoshard.plan(autoshard.trace(step, args), topology="cpu:8", mesh=MESH)
    names: dict[str, Any] = {}
    exec(export_plan(plan, form, autoshard.trace(step, args), force=True), names)
    given = (2, np.arange(128, dtype=np.float32).reshape(16, 8), np.ones((32, 16), np.float32))
    wanted = step(*given)
    ways = [(step, {}), (scaled, {"static_argnums": (0,)}), (scaled, {"static_argnames": "count"})]
    for made in ("jit",) if form == "jax" else ("jit", "jit_unchanged"):
        for fn, options in ways:
            found = names[made](fn, args, **options)(*given)
            np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
            assert found[0].sharding.spec == plan.arguments["w"].partition_spec() and int(found[1]) == 2
