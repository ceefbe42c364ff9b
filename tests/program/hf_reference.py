"""The real transformers module of a configuration, with weights, and its eager results as numpy arrays."""

import importlib
import inspect

import numpy as np


STEP = 1e3
"""Learning rate of the comparisons: large, so that an updated parameter has its gradient in full precision."""


def real_model(fields, seed=0, **overrides):
    import torch

    kind = fields["model_type"].replace("-", "_")
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    model_class = getattr(modeling, fields["architectures"][0])
    known = {k: v for k, v in fields.items() if k not in ("architectures", "model_type")}
    config = model_class.config_class(**known, **overrides)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:  # the usual ones and zeros would hide a swapped weight
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def close(actual, expected, tolerance=1e-5):
    """Assert that the largest difference over the tensor's own maximum is below the tolerance."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    scale = max(np.abs(expected).max(), 1e-30)
    difference = np.abs(actual - expected).max() / scale
    assert difference < tolerance, difference


def random_batch(program, position, labels=None, seed=4):
    """Draw a batch for `program` from the shapes of its `position`-th argument; ids and labels are below `labels`."""
    rng = np.random.default_rng(seed)
    batch = {}
    for key, leaf in program.args[position].items():
        if leaf.dtype.kind == "i":
            batch[key] = rng.integers(0, labels or 200, leaf.shape).astype(np.int32)
        else:
            batch[key] = rng.standard_normal(leaf.shape).astype(np.float32)
    return batch


def check_training_step(config, monkeypatch, **options):
    """Compare one SGD step of `hf:config` with torch: loss, gradients of all parameters, running statistics.

    If it fails, another batch must agree. At a ReLU's input close to 0, a gradient may depend on the order in which
    threads sum. This was seen once, for a ResNet on a busy machine.
    """
    try:
        return _check_training_step(config, monkeypatch, 4, **options)
    except AssertionError:
        return _check_training_step(config, monkeypatch, 5, **options)


def _check_training_step(config, monkeypatch, seed, **options):
    import jax
    import torch

    from autoshard.program import open_source
    from autoshard.program.config_files import read_config
    from autoshard.program.jax import optimizers
    from autoshard.program.torch.torch_function import TorchFunction

    monkeypatch.setattr(optimizers, "LEARNING_RATE", STEP)
    _, fields = read_config(config)
    experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in fields else {}
    model = real_model(fields, **experts)
    function = TorchFunction(model, frozen_apart=True)
    params, buffers = function.values(), function.buffer_values()
    for module in model.modules():
        module.train(isinstance(module, torch.nn.BatchNorm2d))
    program = open_source(f"hf:{config}", train=True, dtype="fp32", optimizer="sgd", **options)
    batch = random_batch(program, 2, labels=fields.get("num_labels", fields.get("vocab_size")), seed=seed)
    inputs = {k: torch.tensor(v).long() if v.dtype.kind == "i" else torch.tensor(v) for k, v in batch.items()}
    labels = inputs.pop("labels")
    cached = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    logits = model(**inputs, **cached).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    loss.backward()
    after_torch = function.buffer_values()
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        parameter.data, parameter.grad = gradient, None
    grads = function.values()

    made = program.make_args(0)
    outputs = jax.jit(program.fn)(params, made[1], batch, *([buffers] if buffers else []))
    close(outputs[-1], loss.detach().numpy())
    assert outputs[0].keys() == params.keys()
    for name in params:
        close(outputs[0][name], params[name] - STEP * grads[name], 3e-5)
    if len(outputs) == 4:
        for name in buffers:
            close(outputs[2][name], after_torch[name])
            if name.endswith("running_mean"):
                assert np.abs(np.asarray(outputs[2][name]) - buffers[name]).max() > 1e-4
    return program, model
