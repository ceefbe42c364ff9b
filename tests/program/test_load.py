"""Program files and `hf:` names: the ones that load, and the errors of those that do not."""

import functools
import json

import pytest

import autoshard
from autoshard.errors import UserError
from autoshard.planning import reopen
from autoshard.program import load_program, open_source, read_config


JAX = "import jax, jax.numpy as jnp\nX = jax.ShapeDtypeStruct((4, 8), jnp.float32)\n"


def _write(tmp_path, text, name="model.py"):
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "body",
    [
        "def program():\n    return (lambda x: x * 2), (X,)\n",
        "program = ((lambda x: x * 2), (X,))\n",
        "from autoshard.program import trace\nprogram = trace(lambda x: x * 2, (X,))\n",
        "from autoshard.program import trace\ndef program():\n    return trace(lambda x: x * 2, (X,))\n",
        "import torch\ndef program():\n    return torch.nn.Linear(8, 2, device='meta'), (torch.empty(4, 8),)\n",
        "import torch\ndef program():\n    return torch.nn.Linear(8, 2), torch.ones(4, 8)\n",
        "import torch\ndef program():\n    return torch.nn.Linear(8, 2), (), {'input': torch.ones(4, 8)}\n",
    ],
)
def test_what_a_file_may_offer(tmp_path, body):
    program = load_program(_write(tmp_path, JAX + body))
    assert program.results[0].shape[0] == 4


def test_every_command_traces_a_file_to_the_same_bytes(tmp_path):
    file = str(_write(tmp_path, JAX + "def program():\n    return (lambda x: jnp.tanh(x) * 2), (X,)\n"))
    plan = autoshard.plan(open_source(file), topology="cpu:2", mesh="data=2")
    # Both are called from one line, since the caller's own line is in the locations of ops.
    ways = (functools.partial(open_source, file), functools.partial(reopen, plan))
    first, second = [way().module for way in ways]
    assert first == second


def test_a_file_may_import_its_neighbour(tmp_path):
    _write(tmp_path, "def double(x):\n    return x * 2\n", "neighbour_of_model.py")
    file = _write(tmp_path, JAX + "from neighbour_of_model import double\ndef step():\n    return double, (X,)\n")
    assert open_source(str(file), entry="step").arguments[0].shape == (4, 8)


def test_dataclasses_and_late_imports_work_in_a_file(tmp_path):
    _write(tmp_path, "SCALE = 3\n", "late_neighbour.py")
    body = (
        "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    width: 'int' = 8\n"
        "def program():\n    from late_neighbour import SCALE\n    return (lambda x: x * SCALE), (X,)\n"
    )
    assert load_program(_write(tmp_path, JAX + body)).results[0].shape == (4, 8)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("import jax\nraise ValueError('no good')\n", r"model.py` raised ValueError: no good \(line 2\)\."),
        ("def f(:\n", r"model.py` raised SyntaxError: .* \(line 1\)\."),
        (
            "import no_such_module_here\n",
            r"raised ModuleNotFoundError: No module named 'no_such_module_here' \(line 1\)",
        ),
        ("exit(3)\n", r"raised SystemExit: 3"),
        ("class End(BaseException): ...\nraise End('now')\n", r"model.py` raised End: now \(line 2\)\."),
        (
            "class Mute(Exception):\n    def __str__(self):\n        raise KeyError\ndef program():\n    raise Mute\n",
            r"`program\(\)` in `.*` raised Mute: its text cannot be made, which raises KeyError \(line 5\)",
        ),
        (
            "import sys, jax\ndef f(x):\n    sys.exit(3)\nprogram = f, (jax.ShapeDtypeStruct((4,), 'float32'),)\n",
            r"`model` could not be traced by JAX: SystemExit: 3 \(model.py:3\)\.",
        ),
        (
            "import jax\ndef f(x):\n    if x.sum() > 0:\n        return x\n"
            "def program():\n    return f, (jax.ShapeDtypeStruct((4,), 'float32'),)\n",
            r"by JAX: TracerBoolConversionError: .* \(model.py:3\); plans are made from shapes alone: .*jnp.where\.",
        ),
        (
            "import torch\nclass End(BaseException): ...\nclass M(torch.nn.Module):\n    def forward(self, x):\n"
            "        raise End('now')\nmodel, inputs = M(), torch.zeros(2)\n",
            r"`model` could not be lowered: End: now in M.forward at model.py:5;",
        ),
        (
            "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n"
            "        return self.hed(x)\nmodel, inputs = M(), torch.zeros(2)\n",
            r"'M' object has no attribute 'hed' in M.forward at model.py:4\.$",
        ),
        (
            "import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.key = torch.nn.Linear(9, 8)\n    def forward(self, x):\n"
            "        return self.key(x)\nmodel, inputs = M(), torch.zeros(4, 8)\n",
            r"cannot be multiplied \(4x8 and 9x8\) in `key` \(M.forward at model.py:7\); if the module takes other",
        ),
        (
            "def programm():\n    pass\ndef other():\n    pass\n",
            r"offers no `program`; it has `other`, `programm`; define `program\(\)` or name another one with --entry",
        ),
        ("x = 1\n", r"offers no `program`; it has no function"),
        ("def program():\n    raise KeyError('w')\n", r"`program\(\)` in `.*model.py` raised KeyError: 'w' \(line 2\)"),
        ("def program():\n    return 3\n", r"gave an int; expected an autoshard.Program"),
        ("def program():\n    return None, 1, 2, 3\n", r"gave a tuple of 4; expected an autoshard.Program"),
        (
            "def program(n):\n    return n\n",
            r"`program\(\)` in `.*` raised TypeError: program\(\) missing 1 required positional argument",
        ),
    ],
)
def test_sentences_for_bad_files(tmp_path, body, sentence):
    file = _write(tmp_path, body)
    with pytest.raises(UserError, match=sentence):
        load_program(file)


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("nowhere/model.py", {}, "there is no file `nowhere/model.py`"),
        ("nowhere", {}, "`nowhere` is neither an existing file nor `hf:CONFIG`; did you mean `hf:nowhere`?"),
        ("hf:", {}, "needs the path of a config.json or a bundled name: .*gpt2"),
        ("hf:llama3-8", {}, "`hf:llama3-8` is neither a file nor a bundled configuration; did you mean `llama3-8b`"),
        ("hf:zzzz", {}, "bundled are .*gpt2"),
        ("hf:gpt2-tiny", {"train": True, "infer": True}, "--train and --infer exclude each other"),
        ("hf:gpt2-tiny", {"dtype": "int4"}, "--dtype `int4` is not supported"),
        ("hf:gpt2-tiny", {"state_dtype": "fp4"}, "--state-dtype `fp4` is not supported"),
        ("hf:gpt2-tiny", {"remat": "some"}, "remat `some` does not exist; use `none`, `dots` or `full`"),
        ("hf:gpt2-tiny", {"batch": 0}, "--batch must be a positive whole number, got 0"),
        (
            "hf:gpt2-tiny",
            {"seq": 4096},
            "--seq 4096 is longer than the 128 positions `gpt2-tiny` has; give at most 128",
        ),
        (
            "hf:gpt2-tiny",
            {"train": True, "optimizer": "lamb"},
            "there is no optimizer `lamb`; use one of `adamw`, `sgd`",
        ),
    ],
)
def test_sentences_for_bad_sources(text, options, sentence):
    with pytest.raises(UserError, match=sentence):
        open_source(text, **options)


TORCH = "import torch\nmodel = torch.nn.Linear(8, 2, device='meta')\n"
META = "inputs = torch.empty(4, 8, device='meta')\n"


def test_a_number_that_a_module_returns_is_its_loss(tmp_path):
    body = (
        "class Own(torch.nn.Linear):\n    def forward(self, x):\n        number = super().forward(x).square().mean()\n"
    )
    for returned in ("number", "{'loss': number}"):
        text = f"{TORCH}{body}        return {returned}\nmodel = Own(8, 2, device='meta')\n"
        source = str(_write(tmp_path, text + META))
        if returned == "number":
            program = open_source(source, train=True)
            assert program.training and program.results[-1].shape == ()
            assert not any("one number" in note for note in program.notes)
            (note,) = (note for note in open_source(source).notes if "returns one number" in note)
            assert "did you mean `--train`" in note
        else:
            with pytest.raises(UserError, match="or let the module return one number"):
                open_source(source, train=True)


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("def loss(output):\n    return (output**2).mean()\n" + META, "mu."),
        ("program = model, torch.empty(4, 8)\ndef loss(output):\n    return output.sum()\n", "mu."),
        (
            "def program():\n    return model\n" + META + "targets = torch.empty(4, 2, device='meta')\n"
            "loss = torch.nn.functional.mse_loss\n",
            "targets",
        ),
    ],
)
def test_a_torch_module_in_a_file_becomes_a_training_step(tmp_path, body, state):
    file = str(_write(tmp_path, TORCH + body))
    program = open_source(file, train=True, optimizer="adamw", state_dtype="bfloat16")
    assert program.training and program.results[-1].shape == ()
    assert any(state in argument.name for argument in program.arguments)
    assert {a.dtype for a in program.arguments if a.role == "optimizer_state" and a.shape} == {"bfloat16"}
    assert not any("No loss was given" in note for note in program.notes)
    assert not open_source(file).training and not open_source(file, train=False).training
    assert not any("one number" in note for note in open_source(file).notes)


@pytest.mark.parametrize(
    ("body", "options", "sentence"),
    [
        (
            TORCH + META,
            {"train": True},
            r"`--train` needs a loss, and `.*` has none: define `loss\(output\)`",
        ),
        (TORCH + "program = model, torch.empty(4, 8), 3\n", {}, "is an int; expected a dict of keyword inputs"),
        (
            TORCH + META + "loss = torch.sum\n",
            {"train": True, "state_dtype": "fp99"},
            "state_dtype `fp99` is not supported; use bfloat16, float32 or float16",
        ),
        (
            TORCH + META + "loss = torch.nn.functional.mse_loss\n",
            {"train": True},
            r"the loss of `.*`, `mse_loss`, takes targets: define `targets` in the Python file",
        ),
        (JAX + "program = (lambda x: x), (jax.ShapeDtypeStruct((-1, 4), 'float32'),)\n", {}, "has the dynamic shape"),
        (TORCH + META, {"optimizer": "sgd"}, r"`--optimizer` only applies to training; add `--train`"),
        (TORCH, {}, r"has a torch module without example inputs: define `inputs`"),
        (JAX + "program = (lambda x: x), (X,)\n", {"train": True}, r"`--train` only applies to `hf:CONFIG` and to"),
        (TORCH + META, {"train": True, "seq": 8}, r"`--seq` only applies to `hf:CONFIG`"),
    ],
)
def test_sentences_for_training_a_file(tmp_path, body, options, sentence):
    with pytest.raises(UserError, match=sentence):
        open_source(str(_write(tmp_path, body)), **options)


def test_options_of_configurations_do_not_apply_to_files(tmp_path):
    file = _write(tmp_path, "x = 1\n")
    with pytest.raises(UserError, match="`--batch` only applies to `hf:CONFIG`"):
        open_source(str(file), batch=3)
    with pytest.raises(UserError, match="is a directory"):
        open_source(str(tmp_path))


def test_an_option_of_false_overrides_a_preferred_one(tmp_path):
    file = str(_write(tmp_path, TORCH + META + "def loss(output):\n    return output.sum()\n"))
    assert open_source(file, preferred={"train": True}).training
    assert not open_source(file, preferred={"train": True}, train=False).training
    with pytest.raises(UserError, match="`--scan` only applies to `hf:CONFIG`"):
        open_source(file, scan=False)


def test_choices_are_for_functions_of_python_files(tmp_path):
    recipe = {"width": 8, "remat": "full"}
    for body in ("program = (lambda x: x * 2), (X,)\n", TORCH + META):
        with pytest.raises(UserError, match="is no function that could take the choices `width`, `remat`"):
            open_source(str(_write(tmp_path, JAX + body)), recipe=recipe)
    module = _write(tmp_path, "module {}\n", "step.mlir")
    for text in (str(module), "hf:gpt2-tiny"):
        with pytest.raises(UserError, match="`width`, `remat` are for a function in a Python file; `.*` takes none"):
            open_source(text, recipe=recipe)
    body = "def program(width, remat):\n    return (lambda x: x * 2), (jax.ShapeDtypeStruct((4, width), 'int32'),)\n"
    assert open_source(str(_write(tmp_path, JAX + body)), recipe=recipe).arguments[0].shape == (4, 8)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not a readable JSON file"),
        ("[]", "has no `model_type`"),
        ('{"model_type": "no-such-model"}', "the installed transformers has no model type `no-such-model`"),
        ('{"model_type": "gpt2", "architectures": ["GPT9"]}', "transformers offers no `GPT9` for model type `gpt2`"),
        (
            '{"model_type": "gpt2", "n_embd": 30, "n_head": 4, "architectures": ["GPT2LMHeadModel"]}',
            "cannot be built: ValueError",
        ),
    ],
)
def test_bad_configurations(tmp_path, text, sentence):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        open_source(f"hf:{file}")


def test_a_configuration_file_of_the_users(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,'
        ' "intermediate_size": 48, "architectures": ["LlamaForCausalLM"]}'
    )
    program = open_source(f"hf:{tmp_path}", batch=2, seq=8)
    assert program.results[0].shape == (2, 8, 64) and program.name == f"{tmp_path.name} inference"


def test_a_model_of_the_hub_is_read_from_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    get = "`hf:Some/Llama-1B` is neither a file nor in the cache .*hub: get it once with `hf download Some/Llama-1B "
    with pytest.raises(UserError, match=get):
        read_config("Some/Llama-1B")
    folder = tmp_path / "hub" / "models--Some--Llama-1B"
    for revision, layers in (("aaaa", 2), ("bbbb", 3)):
        (folder / "snapshots" / revision).mkdir(parents=True)
        fields = {"model_type": "llama", "num_hidden_layers": layers}
        (folder / "snapshots" / revision / "config.json").write_text(json.dumps(fields))
    assert read_config("Some/Llama-1B") == ("Llama-1B", {"model_type": "llama", "num_hidden_layers": 2})
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbbb")
    assert read_config("Some/Llama-1B")[1]["num_hidden_layers"] == 3
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="elsewhere: get it once with"):
        read_config("Some/Llama-1B")
    with pytest.raises(UserError, match="is neither a file nor a bundled configuration"):
        read_config("Some/model.json")
