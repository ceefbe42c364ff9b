"""The linear layers of a torch module whose matmuls are computed with 8 bits in training."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from autoshard.errors import UserError
from autoshard.program.kernels.eight_bits import EightBits, Rounding, in_eight_bits
from autoshard.program.torch.low_rank import is_linear
from autoshard.program.torch.module_state import replace_forward


_MULTIPLE = 16
"""Sizes of matmuls in 8 bits are multiples of this on GPUs (cuBLASLt); layers of other sizes are left as they are."""


def eight_bit_layers(module: Any, layers: Collection[str]) -> dict[str, Any]:
    """Return the linear layers inside of `layers`, the names of repeated layers, whose sizes allow 8 bits, by path.

    Heads and embeddings are in no repeated layer, and norms and products of attention are no linear layers.
    """
    return {
        path: child
        for path, child in module.named_modules()
        if is_linear(child)
        and not any(size % _MULTIPLE for size in child.weight.shape)
        and any(path.startswith(f"{layer}.") for layer in layers)
    }


def eight_bit_note(module: Any, layers: Collection[str], how: EightBits, label: str) -> str:
    """Return a sentence on the layers in 8 bits; raise `UserError` if the module `label` has none."""
    chosen = eight_bit_layers(module, layers).values()
    weights = sum(child.weight.numel() for child in chosen)
    if not weights:
        raise UserError(f"--quantize: `{label}` has no repeated layers with linear layers; leave it out.")
    total = sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)
    return (
        f"Linear layers of repeated layers, {weights / total:.0%} of the weights, are multiplied in {how.form} in both "
        "passes, with a scale for each row; heads, embeddings, experts and products of attention are not."
    )


@contextlib.contextmanager
def computed_in_eight_bits(module: Any, layers: Collection[str], how: EightBits | None) -> Iterator[None]:
    """Compute the layers of `eight_bit_layers` in a form while inside; None changes nothing."""
    replaced: list[tuple[Any, Any]] = []
    state = None if how is None else Rounding(how)

    def replace(child: Any) -> None:
        """Let a layer's own forward run in 8 bits."""
        own = child.__dict__.get("forward")

        def forward(*given: Any) -> Any:
            """Return the layer's result, as its instance or its class defines it."""
            with in_eight_bits(state):
                return type(child).forward(child, *given) if own is None else own(*given)

        replaced.append((child, replace_forward(child, forward)))

    try:
        for child in eight_bit_layers(module, layers).values() if how is not None else ():
            replace(child)
        yield
    finally:
        for child, before in replaced:
            replace_forward(child, before)
