"""What a Hugging Face model is trained on, from what it gives."""

from collections.abc import Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.program import _train


class OtherLabels(UserError):
    """A model wants labels of another shape than it was offered, or none."""

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        """`shape` is that of the labels; None if there are none."""
        super().__init__("the labels of this model have another shape.")
        self.shape = shape


class Objective:
    """The loss of a model, found from the shapes of its outputs.

    `logits` [..., classes] are compared with labels; a model that compares its inputs with one another has its own
    loss; of a model with another head the mean of squares of its first output is minimised, and a note says so.
    """

    def __init__(self, architecture: str, name: str, notes: list[str], headed: bool) -> None:
        """`architecture` is the class's name; `headed`: it is one for a task; `notes` are added to."""
        self.architecture, self.name, self.notes, self.headed = architecture, name, notes, headed
        self.classes: int | None = None
        """Labels stay below it."""

    def of(self, out: Any, labels: Any) -> Any:
        """The scalar loss. Raises `OtherLabels`, and `UserError` for a model without a head."""
        import jax
        import jax.numpy as jnp

        found = out if isinstance(out, Mapping) else {}
        if "logits" in found and hasattr(found["logits"], "ndim"):
            logits = found["logits"]
            if "Segmentation" in self.architecture and logits.ndim == 4:
                logits = jnp.moveaxis(logits, 1, -1)
            if labels is None or logits.shape[:-1] == labels.shape:
                if labels is not None:
                    self.classes = int(logits.shape[-1])
                    return _train.token_loss(logits, labels)
            elif logits.shape != labels.shape and logits.ndim > 1:
                raise OtherLabels(tuple(logits.shape[:-1]))
        elif found.get("loss") is not None and found["loss"].ndim == 0:
            if labels is not None:
                raise OtherLabels(None)
            return found["loss"].astype(jnp.float32)
        elif not self.headed:
            raise UserError(
                f"`{self.name}` has no `logits` to train on; name an architecture with a head in the configuration."
            )
        if labels is not None:
            raise OtherLabels(None)
        leaves = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        if not leaves:
            raise UserError(
                f"`{self.name}` gives no output of floats to train on; plan its inference: leave --train out."
            )
        what = "the step minimises the mean of squares of its first output."
        text = f"No labels are known for `{self.architecture}`: {what}"
        if text not in self.notes:
            self.notes.append(text)
        return jnp.mean(jnp.square(leaves[0].astype(jnp.float32)))
