"""The real transformers module of a configuration, with weights, and its eager results as numpy arrays."""

import importlib

import numpy as np


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
    """Largest difference over the tensor's own maximum."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    scale = max(np.abs(expected).max(), 1e-30)
    difference = np.abs(actual - expected).max() / scale
    assert difference < tolerance, difference
