"""`hf:CONFIG`: the program of a Hugging Face configuration, without weights and without the network."""

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from autoshard.base.shared_results import shared
from autoshard.errors import UserError
from autoshard.program.config_files import read_config
from autoshard.program.hf.hf_eager import Objective, OtherLabels, hf_eager, reduced_fields, reduced_twin
from autoshard.program.hf.hf_head import head_left_out, head_of
from autoshard.program.hf.hf_model import build_model, has_head, runnable_part
from autoshard.program.hf.hf_padding import Padded, check_beside, padded_model, parse_padding
from autoshard.program.hf.hf_serving import ServingStep, serving_program
from autoshard.program.hf.task_inputs import HfTask, tasks_of
from autoshard.program.jax.chunked_loss import LossChunks, parse_loss_chunks
from autoshard.program.jax.token_sampling import parse_sampling
from autoshard.program.moe.experts import check_experts
from autoshard.program.program_record import Program
from autoshard.program.remat_marks import check_names
from autoshard.program.torch.eager_twin import EagerTwin
from autoshard.program.torch.layer_remat import parse_remat
from autoshard.program.torch.low_rank import check_lora, with_adapters
from autoshard.program.torch.module_mode import evaluation_mode
from autoshard.program.torch.step_options import ConfigOptions, LayerForms, given_options, read_layers, read_training
from autoshard.program.torch.torch_function import TorchFunction
from autoshard.program.torch.torch_module import torch_program
from autoshard.program.torch_ops.torch_imports import require_torch


_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "f32": "float32", "bfloat16": "bfloat16"} | {
    "float32": "float32",
    "float16": "float16",
}
"""Names of dtypes in options -> names of JAX and torch."""


_OF_RECIPE = ("remat", "microbatches", "gradient_groups", "optimizer", "state_dtype")
"""Options that change neither the forward pass nor what `settle` learns of it, without stages and remat mixtures."""

_COMPARED_TOKENS = 64
"""Longest sequence of a reduced model that is compared with eager torch."""


def from_config(config: str | Mapping[str, Any], **options: Unpack[ConfigOptions]) -> Program:
    """Return one training step, forward pass or serving step of the model that `config` names or whose fields it has.

    It is a forward pass unless `train` or `serve` is given.

    The options are those of `from_torch`, except for `batch_statistics` and `cast_inputs`, and these:

    - `infer`: True to request the forward pass explicitly.
    - `batch`: number of examples, by default 8.
    - `seq`: tokens of a sequence, by default the model's context up to 1024. `image`: pixels of an image's side.
    - `dtype`: bfloat16 by default. `param_dtype` is float32 by default in training; inference stores parameters in
      `dtype`.
    - `pad`: numbers of which sizes become multiples by zeros, `128` (of the vocabulary), `vocabulary=128,heads=8` or
      also `width=256` (of feed-forward layers). Loss and updates are those without padding.
    - `loss_chunks`: chunks in which logits and loss are computed, `8` (of the vocabulary) or `tokens=4,vocabulary=8`.
    - `experts`: dispatch of tokens to experts, by einsums into `slots` (`slots:all`: for every token) or `sorted`
      (`sorted:8`: in 8 groups of experts).
    - `capacity_factor`: slots of an expert, or rows of a group, relative to the mean number of its tokens. The default
      is 1.25 for slots, and for groups the most that can be needed.
    - `imbalance`: tokens of the busiest device's experts relative to the mean, for prices only.
    - `serve`: `prefill` (of `seq` tokens) or `decode` (one token after up to `seq`), with the key-value cache as
      donated state. `cache` is its number of tokens, by default `seq`.
    - `sample`: the serving step returns tokens in place of logits: `greedy`, or `temperature=0.8,top_k=50,top_p=0.9`.
    - `attention`: also `cached` (a kernel for decoding). With `auto`, `splash` or `cached` is used if that is possible
      and beneficial.

    Raises `UserError` for a configuration or an option that cannot be used, such as an option of training in a forward
    pass.
    """
    name, fields = read_config(config)
    given = given_options("from_config", ConfigOptions, options)
    training, serve, cache, image = bool(given.get("train")), given.get("serve"), given.get("cache"), given.get("image")
    if training and given.get("infer"):
        raise UserError("--train and --infer exclude each other; give one of them.")
    compute = _dtype(given.get("dtype", "bfloat16"), "dtype")
    stored = _dtype(given.get("param_dtype", "float32" if training else compute), "param_dtype")
    moments = {"state_dtype": _dtype(given.get("state_dtype", "float32"), "state_dtype")}
    layers = read_layers(given)
    chunks = parse_loss_chunks(given.get("loss_chunks"))
    padding = parse_padding(given.get("pad"))
    for option in ("optimizer", "state_dtype", "microbatches", "gradient_groups", "loss_chunks", "pad"):
        of_stages = option == "microbatches" and layers.pipeline is not None
        if not training and not of_stages and given.get(option) not in (None, 1):
            raise UserError(f"--{option.replace('_', '-')} is for training steps; add --train, or leave it out.")
    if cache is not None and serve is None:
        raise UserError("--cache is for serving; add --serve prefill or --serve decode, or leave it out.")
    sampling = parse_sampling(given.get("sample"))
    if sampling is not None and serve is None:
        raise UserError("--sample is for serving; add --serve prefill or --serve decode, or leave it out.")
    if layers.pipeline is not None and serve is not None:
        raise UserError("--stages is for training steps and forward passes; leave it out, or --serve.")
    require_torch("transformers")
    lora = check_lora(given)
    model_key = json.dumps([name, fields, compute], default=str)
    build = functools.partial(build_model, name, fields, compute)
    model, model_notes = runnable_part(build() if lora is not None else shared("module", model_key, build, 1))
    padded: Padded | None = None
    if padding is not None:
        check_beside(padding, given)
        padded = padded_model(model, fields, padding, name, compute)
        model, model_notes = padded.model, padded.notes
    classes = None if padded is None else padded.classes
    if lora is not None:
        model, more = with_adapters(model, lora, name)
        model_notes = (*model_notes, *more)
    layers = dataclasses.replace(layers, experts=check_experts(given, model, name))
    size = given.get("batch", 8)
    tasks = tasks_of(model, name, batch=size, seq=given.get("seq"), image=image, train=training, dtype=compute)
    stateful = evaluation_mode(model, training)

    def made() -> TorchFunction:
        """Return the module as a new function under the options."""
        return TorchFunction(
            model,
            layers,
            compute_dtype=compute if compute != stored else None,
            frozen_apart=training,
            stateful=stateful,
        )

    task = tasks[0]
    if serve is not None:
        if training or task.seq is None:
            raise UserError("--serve is for the inference of models of tokens; leave --train and --image out.")
        asked = ServingStep(serve, size, task.seq, task.seq if cache is None else cache, sampling)
        return serving_program(made(), name, asked, dtype=compute, vocabulary=task.id_limit)

    def retrace(parameters: int) -> EagerTwin:
        """Return the twin of the reduced model in float32, with 2 examples and at most `_COMPARED_TOKENS` tokens."""
        shorter = None if task.seq is None else min(task.seq, _COMPARED_TOKENS)
        small = from_config(
            reduced_fields(fields), train=training, batch=2, seq=shorter, image=image, dtype="float32",
            remat=layers.remat, scan=layers.scan, lora=given.get("lora"),
        )  # fmt: skip
        return reduced_twin(small, parameters)

    def settle() -> _Settled:
        """Return the first of the tasks on which the module runs, settled."""
        first_error: UserError | None = None
        for task in tasks:
            try:
                return _settled(made(), task, name, (*model_notes, *task.notes), training, chunks, classes)
            except UserError as error:
                first_error = first_error or error
                if "could not be lowered" not in str(error) or task is tasks[-1]:
                    raise first_error from None
        raise AssertionError("there is a task")

    settled = _settled_once(settle, model_key, given, layers)
    task, notes = settled.task, list(settled.notes)
    function = _copied(settled.function)
    function.remat = parse_remat(layers.remat)
    check_names(layers.remat, function.remat.names, function.savable, name)
    run, objective = _step_of(function, task, name, notes, training, chunks, classes)
    objective.classes = settled.classes
    program = torch_program(
        function,
        run,
        dict(settled.batch),
        name=f"{name} {'training' if training else 'inference'}",
        train=read_training(given | moments, layers),
        param_dtype=stored,
        id_limit=min(task.id_limit, objective.classes or task.id_limit),
        tokens=task.tokens,
        notes=notes,
        eager=hf_eager(model, task, training, functools.partial(evaluation_mode, batch_statistics=training), retrace),
    )
    return program if padded is None else padded.program(program)


@dataclasses.dataclass(frozen=True, slots=True)
class _Settled:
    """A module whose scanned layers are known; it is not changed any more."""

    function: TorchFunction
    task: HfTask
    """The inputs on which the module runs."""
    batch: Mapping[str, Any]
    """Shapes of the batch by name, with labels of the shape that the outputs require, or none."""
    notes: tuple[str, ...]
    """Sentences on the model, the task and the objective."""
    classes: int | None
    """`Objective.classes` of the trace."""


def _settled_once(settle: Callable[[], _Settled], model: str, given: Mapping[str, Any], layers: LayerForms) -> _Settled:
    """Return the result of `settle`, shared by recipes that differ in options of `_OF_RECIPE` only.

    A mixture of remat policies and stages cut the layers, so that their results are not shared. The same holds for a
    module without layers, whose notes name the policy.

    - `settle`: traces the module until it is settled.
    - `model`: text that identifies the module.
    - `given`, `layers`: options of the step, and the forms of layers in them.
    """
    if layers.pipeline is not None or given.get("lora") or len(parse_remat(layers.remat).parts) > 1:
        return settle()
    key = json.dumps([model, sorted(each for each in given.items() if each[0] not in _OF_RECIPE)], default=str)
    settled = shared("settled", key, settle, 1)
    return settled if settled.function.layers else settle()


def _copied(function: TorchFunction) -> TorchFunction:
    """Return a copy of a settled function; calls of one change no record of the other."""
    twin = copy.copy(function)
    for name, value in vars(function).items():
        if isinstance(value, dict | list | set):
            setattr(twin, name, copy.copy(value))
    return twin


def _step_of(
    function: TorchFunction,
    task: HfTask,
    name: str,
    notes: list[str],
    training: bool,
    chunks: LossChunks | None,
    classes: int | None,
) -> tuple[Callable[..., Any], Objective]:
    """Return the step of parameters, batch and buffers, and its objective.

    The step is the loss in training, else the forward pass.

    - `function`: the module as a function.
    - `task`: inputs of the model.
    - `name`: name of the model in errors.
    - `notes`: receives notes about the objective.
    - `training`: True for the loss; `chunks`: chunks in which it is computed, None for all logits at once.
    - `classes`: classes of the logits that count, None for all.
    """
    kind = type(function.module).__name__
    objective = Objective(kind, name, notes, has_head(kind), classes)

    def forward(params: Any, inputs: Any, *buffers: Any) -> Any:
        """Run the module; return its logits in inference if it has any, else all outputs."""
        out = function(params, (), task.call(inputs), buffers[0] if buffers else None)
        return out["logits"] if "logits" in out and not training else out

    def loss(params: Any, inputs: Any, *buffers: Any) -> Any:
        """Run the module and return the scalar loss."""
        if chunks is not None:
            apart = head_of(function.module, name)
            with head_left_out(apart):
                out = forward(params, inputs, *buffers)
            names = {id(tensor): key for key, tensor in function.module.named_parameters()}
            objective.classes = classes or apart.head.out_features
            return apart.loss(out, params, names, inputs.get("labels"), chunks, classes)
        return objective.of(forward(params, inputs, *buffers), inputs.get("labels"))

    return loss if training else forward, objective


def _settled(
    function: TorchFunction,
    task: HfTask,
    name: str,
    notes: Sequence[str],
    training: bool,
    chunks: LossChunks | None,
    classes: int | None,
) -> _Settled:
    """Trace `function` until its scanned layers are known; its scanned blocks and, in training, `keeps_writes` change.

    The arguments are those of `_step_of`; `notes` come before those about the objective. Raises `UserError` if the
    module does not run on the task's inputs.
    """
    import jax
    import numpy as np

    told = list(notes)
    run, objective = _step_of(function, task, name, told, training, chunks, classes)
    function.may_become_stateful = training
    batch_of = dict(task.batch)
    try:
        function.settle(run, batch_of, name)
    except OtherLabels as error:  # the trace has shown the shape of the labels
        batch_of.pop("labels", None)
        if error.shape is not None:
            batch_of["labels"] = jax.ShapeDtypeStruct(error.shape, np.int32)
        function.settle(run, batch_of, name)
    return _Settled(function, task, batch_of, tuple(told), objective.classes)


def _dtype(text: str, flag: str) -> str:
    """Return the full name of a dtype that the option `flag` has; raise `UserError` for others than in `_DTYPES`."""
    if text not in _DTYPES:
        raise UserError(f"--{flag.replace('_', '-')} `{text}` is not supported; use bfloat16, float32 or float16.")
    return _DTYPES[text]
