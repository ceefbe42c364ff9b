"""`hf:CONFIG`: the program of a Hugging Face configuration, without weights and without the network."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.program.config_files import read_config
from autoshard.program.hf.hf_eager import Objective, OtherLabels, hf_eager, reduced_fields, reduced_twin
from autoshard.program.hf.hf_model import build_model, has_head, runnable_part
from autoshard.program.hf.hf_serving import serving_program
from autoshard.program.hf.task_inputs import HfTask, tasks_of
from autoshard.program.jax.layer_stack import read_pipeline
from autoshard.program.moe.experts import check_experts
from autoshard.program.program_record import Program
from autoshard.program.torch.eager_twin import EagerTwin
from autoshard.program.torch.layer_remat import parse_remat
from autoshard.program.torch.torch_function import TorchFunction
from autoshard.program.torch.torch_module import TrainOptions, evaluation_mode, sequential_microbatches, torch_program
from autoshard.program.torch_ops.torch_imports import require_torch


_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "f32": "float32", "bfloat16": "bfloat16"} | {
    "float32": "float32",
    "float16": "float16",
}


_COMPARED_TOKENS = 64
"""Longest sequence of a reduced model that is compared with eager torch."""


def from_config(
    config: str | Mapping[str, Any],
    *,
    train: bool | None = None,
    infer: bool | None = None,
    batch: int | None = None,
    seq: int | None = None,
    image: int | None = None,
    dtype: str | None = None,
    param_dtype: str | None = None,
    state_dtype: str | None = None,
    remat: str | None = None,
    optimizer: str | None = None,
    experts: str | None = None,
    capacity_factor: float | None = None,
    imbalance: float | None = None,
    serve: str | None = None,
    cache: int | None = None,
    scan: bool = True,
    attention: str = "plain",
    exchange: str = "auto",
    microbatches: int | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    gradient_groups: int | None = None,
) -> Program:
    """Return one training step, forward pass or serving step of the model that `config` names or whose fields it has.

    - `train`: True for a training step; by default a forward pass. `infer`: True to request the forward pass
      explicitly.
    - `batch`: number of examples, by default 8.
    - `seq`: tokens of a sequence, by default the model's context up to 1024. `image`: pixels of an image's side.
    - `dtype`: compute dtype, by default bfloat16.
    - `param_dtype`, `state_dtype`: dtypes of stored parameters and of optimizer moments, by default float32 in
      training. Inference stores parameters in `dtype`.
    - `remat`: `none`, `dots` or `full`. It may list saved and offloaded values (`full,keep=q_proj,offload=input`), or
      have one policy for the first layers and one for the others (`full:20+none`).
    - `optimizer`: `adamw` (the default) or `sgd`.
    - `experts`: dispatch of tokens to experts, by einsums into `slots` (`slots:all`: for every token) or `sorted`
      (`sorted:8`: in 8 groups of experts).
    - `capacity_factor`: slots of an expert, or rows of a group, relative to the mean number of its tokens. The default
      is 1.25 for slots, and for groups the most that can be needed.
    - `imbalance`: tokens of the busiest device's experts relative to the mean, for prices only.
    - `serve`: `prefill` (of `seq` tokens) or `decode` (one token after up to `seq`), with the key-value cache as
      donated state. `cache` is its number of tokens, by default `seq`.
    - `scan`: False to unroll repeated layers.
    - `attention`: `plain` (materialised scores), `splash` (jax's kernel for TPUs), `cached` (a kernel for decoding),
      `cudnn` (for GPUs) or `auto`. With `auto`, `splash` or `cached` is used if it is possible and beneficial.
    - `exchange`: exchange of attention if a plan splits the sequence, one of `EXCHANGES`.
    - `microbatches`: number of parts of the batch that are computed in sequence in training.
    - `stages`, `schedule`: pipeline of the repeated layers, as in `autoshard.stack`.
    - `gradient_groups`: number of groups of examples with separate gradients until all microbatches are done.

    Raises `UserError` for a configuration or an option that cannot be used, such as an option of training in a forward
    pass.
    """
    name, fields = read_config(config)
    if train and infer:
        raise UserError("--train and --infer exclude each other; give one of them.")
    training = bool(train)
    compute = _dtype(dtype or "bfloat16", "dtype")
    stored = _dtype(param_dtype, "param_dtype") if param_dtype else ("float32" if training else compute)
    moments = _dtype(state_dtype or "float32", "state_dtype")
    remat = remat or "none"
    parse_remat(remat)
    for flag, value in (
        ("--optimizer", optimizer),
        ("--state-dtype", state_dtype),
        ("--microbatches", None if (stages or 1) > 1 or microbatches == 1 else microbatches),
        ("--gradient-groups", None if gradient_groups == 1 else gradient_groups),
    ):
        if value is not None and not training:
            raise UserError(f"{flag} is for training steps; add --train, or leave it out.")
    if cache is not None and serve is None:
        raise UserError("--cache is for serving; add --serve prefill or --serve decode, or leave it out.")
    pipeline = read_pipeline(stages, microbatches, schedule)
    if pipeline is not None and serve is not None:
        raise UserError("--stages is for training steps and forward passes; leave it out, or --serve.")
    require_torch("transformers")
    model, model_notes = runnable_part(build_model(name, fields, compute))
    form = check_experts(experts, capacity_factor, model, name, imbalance)
    size = 8 if batch is None else batch
    tasks = tasks_of(model, name, batch=size, seq=seq, image=image, train=training, dtype=compute)
    stateful = evaluation_mode(model, training)

    def made() -> TorchFunction:
        return TorchFunction(
            model,
            compute_dtype=compute if compute != stored else None,
            remat=remat,
            scan=scan,
            frozen_apart=training,
            stateful=stateful,
            attention=attention,
            experts=form,
            capacity_factor=capacity_factor,
            exchange=exchange,
            imbalance=imbalance or 1.0,
            pipeline=pipeline,
        )

    task = tasks[0]
    if serve is not None:
        if training or task.seq is None:
            raise UserError("--serve is for the inference of models of tokens; leave --train and --image out.")
        return serving_program(
            made(),
            name,
            serve,
            batch=size,
            seq=task.seq,
            cache_length=task.seq if cache is None else cache,
            dtype=compute,
            vocabulary=task.id_limit,
        )

    def retrace(parameters: int) -> EagerTwin:
        shorter = None if task.seq is None else min(task.seq, _COMPARED_TOKENS)
        small = from_config(
            reduced_fields(fields), train=train, infer=infer, batch=2, seq=shorter, image=image, dtype="float32",
            remat=remat, scan=scan,
        )  # fmt: skip
        return reduced_twin(small, parameters)

    first_error: UserError | None = None
    for task in tasks:
        function, notes = made(), [*model_notes, *task.notes]
        try:
            run, batch_of, objective = _settled(function, task, name, notes, training)
            break
        except UserError as error:
            first_error = first_error or error
            if "could not be lowered" not in str(error) or task is tasks[-1]:
                raise first_error from None
    else:
        raise AssertionError("there is a task")
    return torch_program(
        function,
        run,
        batch_of,
        name=f"{name} {'training' if training else 'inference'}",
        train=TrainOptions(
            optimizer or "adamw",
            stored,
            moments,
            sequential_microbatches(microbatches, pipeline),
            1 if gradient_groups is None else gradient_groups,
        )
        if training
        else None,
        param_dtype=stored,
        id_limit=min(task.id_limit, objective.classes or task.id_limit),
        tokens=task.tokens,
        notes=notes,
        eager=hf_eager(model, task, training, functools.partial(evaluation_mode, batch_statistics=training), retrace),
    )


def _settled(
    function: TorchFunction, task: HfTask, name: str, notes: list[str], training: bool
) -> tuple[Callable[..., Any], dict[str, Any], Objective]:
    """Trace `function` until its scanned layers are known, and return the step, the shapes of its batch and its
    objective.

    The step is the loss in training, else the forward pass. The batch has labels of the shape that the outputs require,
    or none. Changes `function`: its scanned blocks, and `keeps_writes` in training.

    - `name`: name of the model in errors.
    - `notes`: receives notes about the objective.

    Raises `UserError` if the module does not run on the task's inputs.
    """
    import jax
    import numpy as np

    kind = type(function.module).__name__
    objective = Objective(kind, name, notes, has_head(kind))

    def forward(params: Any, inputs: Any, *buffers: Any) -> Any:
        out = function(params, (), task.call(inputs), buffers[0] if buffers else None)
        return out["logits"] if "logits" in out and not training else out

    def loss(params: Any, inputs: Any, *buffers: Any) -> Any:
        return objective.of(forward(params, inputs, *buffers), inputs.get("labels"))

    function.may_become_stateful = training
    run = loss if training else forward
    batch_of = dict(task.batch)
    try:
        function.settle(run, batch_of, name)
    except OtherLabels as error:  # the trace has shown the shape of the labels
        batch_of.pop("labels", None)
        if error.shape is not None:
            batch_of["labels"] = jax.ShapeDtypeStruct(error.shape, np.int32)
        function.settle(run, batch_of, name)
    return run, batch_of, objective


def _dtype(text: str, flag: str) -> str:
    if text not in _DTYPES:
        raise UserError(f"--{flag.replace('_', '-')} `{text}` is not supported; use bfloat16, float32 or float16.")
    return _DTYPES[text]
