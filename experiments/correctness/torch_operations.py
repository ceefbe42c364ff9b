"""Operations of torch, planned as modules are, compared with torch's own: values and gradients.

    python experiments/correctness/torch_operations.py [--only TEXT ...] [--again] [--samples N] [--table]

torch tests its operations with its own samples (`op_db`). Each operation gets a few of these samples here, in place
too. A row is one operation. Results are equal within 2e-4 of each value and 2e-3 of each gradient, of weighted sums of
the results. A refused operation raises, so that a plan never computes something else for it. Operations that differ are
the faults that this script looks for. The run takes six minutes.
"""

import itertools
import sys
import warnings
from typing import Any

import numpy as np

from experiments.lib.harness import Experiment, Rows, grid, own_parser, page


RANDOM = frozenset(
    f"nn.functional.{name}"
    for name in (
        *("dropout", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu"),
        *("fractional_max_pool2d", "fractional_max_pool3d"),
    )
) | {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "rand_like", "randint"),
    *("randint_like", "randn", "randn_like", "uniform", "empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided", "pca_lowrank", "svd_lowrank"),
}
"""Operations whose results are random or uninitialised."""

REASONS = {
    "cholesky": "torch's gradient is symmetric where the other triangle is read; the sum of both is the same",
    "cholesky_inverse": "rounding of an inverse",
    "digamma": "XLA's gradient of it for negative numbers",
    "eigh": "a vector and its negative are both eigenvectors",
    "grid_sampler_3d": "a mode that torch's own function refuses",
    "i0": "XLA's gradient of it at negative numbers",
    "linalg.cholesky": "as `cholesky`",
    "linalg.cholesky_ex": "as `cholesky`",
    "linalg.eigh": "a vector and its negative are both eigenvectors",
    "logcumsumexp": "rounding of a sum",
    "logical_and": "torch follows a gradient through a truth that is written in place",
    "logical_not": "torch follows a gradient through a truth that is written in place",
    "logical_or": "torch follows a gradient through a truth that is written in place",
    "logical_xor": "torch follows a gradient through a truth that is written in place",
    "nn.functional.scaled_dot_product_attention": "dropout that is given as a number is left out",
    "polygamma": "XLA's values of it for negative numbers",
}
"""Reasons of the differences that somebody has examined, by operation."""


def outcome(sample: Any, function: Any) -> str:
    """Compare one sample: return `equal`, `refused: ...`, `differs: ...`, or `torch: ...` if torch itself refuses
    it.
    """
    import jax
    import torch
    from torch.utils import _pytree

    from autoshard.program.torch.torch_function import TorchFunction

    leaves, tree = _pytree.tree_flatten((sample.input, sample.args, dict(sample.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(tensors: Any) -> Any:
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor.clone()
        first, args, kwargs = _pytree.tree_unflatten(filled, tree)
        return function(first, *args, **kwargs)

    class Called(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            return call(tensors)

    def by_torch(follow: bool) -> Any:
        """Run the sample by torch.

        Returns the inputs, the results, flags of results with gradients, the results' weights, the parameters' numbers,
        and the gradients.
        """
        given = [leaves[i].detach().clone().requires_grad_(follow and leaves[i].requires_grad) for i in places]
        results = [each for each in _pytree.tree_leaves(call(given)) if isinstance(each, torch.Tensor)]
        follows = [each.requires_grad and each.is_floating_point() for each in results]
        rng = np.random.default_rng(0)
        weights = [rng.standard_normal(each.shape).astype(np.float32) for each in results]
        terms = [(e * torch.tensor(w)).sum() for e, w, on in zip(results, weights, follows, strict=True) if on]
        learned = [k for k, tensor in enumerate(given) if tensor.requires_grad] if terms else []
        total = sum(terms, torch.zeros(()))
        wanted = torch.autograd.grad(total, [given[k] for k in learned], allow_unused=True) if learned else ()
        return [tensor.detach().numpy() for tensor in given], results, follows, weights, learned, wanted

    try:
        try:
            arrays, expected, follows, weights, learned, wanted = by_torch(follow=True)
        except RuntimeError:  # torch does not differentiate the operation
            arrays, expected, follows, weights, learned, wanted = by_torch(follow=False)
    except Exception as error:  # torch refuses the sample
        return f"torch: {_said(error)}"
    planned = TorchFunction(Called())

    def run(values: Any) -> Any:
        filled = list(arrays)
        for k, value in zip(learned, values, strict=True):
            filled[k] = value
        ours = [each for each in jax.tree.leaves(planned({}, tuple(filled), {})) if hasattr(each, "shape")]
        assert len(ours) == len(expected), "another number of results"
        terms = [(f * w).sum() for f, w, on in zip(ours, weights, follows, strict=True) if on]
        return sum(terms, np.float32(0)), ours

    values = [arrays[k] for k in learned]
    try:
        if learned:
            (_, ours), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(values)
        else:
            (_, ours), gradients = jax.jit(run)(values), []
    except Exception as error:
        return f"refused: {_said(error)}"
    for value, tensor in zip(ours, expected, strict=True):
        own = tensor.detach().resolve_conj()
        own = (own.float() if own.dtype == torch.bfloat16 else own).numpy()
        if value.shape != own.shape:
            return f"differs: shape {value.shape} for {own.shape}"
        if not np.allclose(np.asarray(value), own, rtol=2e-4, atol=1e-4, equal_nan=True):
            return "differs: value"
    for value, tensor in zip(gradients, wanted, strict=True):
        own = np.zeros(value.shape, np.float32) if tensor is None else tensor.numpy()
        if not np.allclose(value, own, rtol=2e-3, atol=1e-3, equal_nan=True):
            return "differs: gradient"
    return "equal"


def _said(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:90] if lines else ''}"


def row(operation: Any, function: Any, count: int) -> dict[str, Any]:
    """Compare some samples of an operation, spread over those that torch has."""
    import torch

    try:
        made = itertools.islice(operation.sample_inputs("cpu", torch.float32, requires_grad=True), 40)
        samples = list(made)
    except Exception as error:  # samples need a missing device or package
        return {"samples": 0, "outcomes": [f"torch: {_said(error)}"]}
    if len(samples) > count:
        samples = [samples[k] for k in np.linspace(0, len(samples) - 1, count).astype(int)]
    outcomes = [outcome(sample, function) for sample in samples]
    tried = [each for each in outcomes if not each.startswith("torch")]
    return {"samples": len(tried), "outcomes": sorted(set(tried or outcomes)) or ["torch: no samples"]}


def table(rows: Rows) -> str:
    by: dict[str, list[str]] = {"differs": [], "refused": [], "equal": [], "torch": []}
    for name, each in sorted(rows.items()):
        kinds = {outcome.partition(":")[0] for outcome in each["outcomes"]}
        by[next(kind for kind in by if kind in kinds)].append(name)

    def said(name: str, kind: str) -> list[str]:
        return [each.partition(": ")[2] for each in rows[name]["outcomes"] if each.startswith(kind)]

    differs = []
    for name in by["differs"]:
        plain = name.rstrip("_")
        why = REASONS.get(plain) or REASONS.get(plain.partition(".")[0], "not looked into")
        differs.append([f"`{name}`", ", ".join(said(name, "differs")), why])
    return page(
        "# Operations of torch beside torch's own",
        """
`python experiments/correctness/torch_operations.py`. Operations of `op_db`, those in place with a `_` at the end; \
random
ones are left out. Equal: values within 2e-4 and gradients within 2e-3 on every sample that was tried;
values alone of what torch does not differentiate.
""",
        [
            f"Of {len(rows) - len(by['torch'])} operations ({sum(each['samples'] for each in rows.values())} samples)",
            f"{len(by['equal'])} are equal on all samples, {len(by['refused'])} are refused on some, "
            f"{len(by['differs'])} differ on some.",
        ],
        grid("differs | how | why", differs),
        grid("refused | with", ([f"`{name}`", said(name, "refused")[0].replace("|", "/")] for name in by["refused"])),
        grid(
            "not tried: no sample that torch itself computes here | with",
            ([f"`{name}`", (said(name, "") or ["no samples"])[0].replace("|", "/")] for name in by["torch"]),
        ),
    )


def operations() -> dict[str, tuple[Any, Any]]:
    """Return each operation that is compared, with its function, by name; those in place have their own."""
    import torch

    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        sys.exit(f"torch's samples need the package `{error.name}`: pip install {error.name}")
    warnings.simplefilter("ignore")
    named = {}
    for operation, in_place in itertools.product(op_db, (False, True)):
        function = operation.inplace_variant if in_place else operation.op
        variant = f".{operation.variant_test_name}" if operation.variant_test_name else ""
        if function is not None and operation.name not in RANDOM and torch.float32 in operation.dtypes:
            named[f"{operation.name}{variant}{'_' if in_place else ''}"] = (operation, function)
    return named


def main() -> int:
    parser = own_parser()
    parser.add_argument("--samples", type=int, default=4, help="of each operation, at most")
    given = parser.parse_args()
    named = operations()
    return Experiment(
        script=__file__, names=named, work=lambda name: row(*named[name], given.samples), table=table
    ).run(given)


if __name__ == "__main__":
    sys.exit(main())
