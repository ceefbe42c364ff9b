"""What frameworks do where nobody says otherwise."""

import re


def stack_axis(framework: str) -> int:
    """The dim of stacked parameters that counts layers where nothing is said: 1 in MaxText (`param_scan_axis`)."""
    return int("maxtext" in framework.lower())


def stream_on_width(framework: str) -> bool:
    """Whether tensor parallelism of a framework splits the residual stream on its width.

    MaxText's axis `tensor` does (`activation_embed` in its logical axis rules; `tensor_sequence` is another axis), and
    so does torchprime's (its configurations mark layers' outputs so). Others are taken to split the sequence.
    """
    return bool(re.search(r"maxtext|torchprime|torch_xla|tpu-recipes", framework, re.I))
