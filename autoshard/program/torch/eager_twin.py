"""A torch module as eager torch runs it, to compare with the JAX function that was traced from it."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autoshard.errors import UserError, reason_of
from autoshard.program.example_values import is_scale
from autoshard.program.torch.module_state import preserved
from autoshard.program.torch.torch_function import TorchFunction, host_array


_Results = tuple[Any, dict[str, Any], dict[str, Any]]
"""Result or loss, gradients, and buffers after the step as host arrays, by the module's own names."""


@dataclasses.dataclass(frozen=True, slots=True)
class EagerCall:
    """The functions that call a torch module in eager torch."""

    call: Callable[[Any, Mapping[str, Any]], Any]
    """`call(module, batch)` returns the module's result for host arrays, or the loss."""
    prepare: Callable[[Any], Any]
    """Function that puts a module into the mode in which it was traced."""
    examples: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Tensors that the module was traced with, by batch name; empty where inputs are otherwise known."""
    rebuild: Callable[[int], Any] | None = None
    """Function that builds the module on the host with random weights of a seed; None for the user's own module."""
    reduce: Callable[[int], "EagerTwin"] | None = None
    """Function that traces a form with at most so many parameters in float32; None if there is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class EagerTwin:
    """The two sides of a comparison with eager torch."""

    function: TorchFunction
    """Traced module, which knows the torch tensors that each of its arguments stacks."""
    step: Callable[..., Any]
    """`step(params, batch[, buffers])` in JAX returns a result or `(loss, gradients)`, and the updated buffers."""
    eager: EagerCall
    """The side of eager torch."""
    make_batch: Callable[[int], Mapping[str, Any]]
    """Function from a seed to plausible inputs as host arrays."""
    training: bool
    microbatches: int = 1
    """Number of microbatches, each of which has every n-th row of the batch."""
    groups: int = 1
    """Parts of each microbatch; each part has a loss, and the mean of these losses is minimised."""
    flops: float = 0.0
    """Model FLOPs of one whole step."""
    form: str = ""
    """Description of the form of the program that is compared; empty for the program itself."""

    @property
    def keeps_writes(self) -> bool:
        """True if the traced step returns the buffers that the module writes to."""
        return self.function.may_become_stateful

    @property
    def parameters(self) -> int:
        """Number of the module's parameters."""
        return sum(parameter.numel() for parameter in self.function.module.parameters())

    def judged(self, parameters: int, flops: float) -> "EagerTwin":
        """Return the twin to compare: the reduced form if there is one, else this twin with a description of its form.

        The limits on parameters and FLOPs of a step are for a twin without a reduced form; a reduced form is limited in
        parameters only. Raises `UserError` if a limit is exceeded. The description names float32, wide matmuls, plain
        attention and room for all tokens, as far as the comparison changes these; it is empty if none.
        """
        if self.eager.reduce is not None:
            return self.eager.reduce(parameters)
        for count, most, unit in ((self.parameters, parameters, "parameters"), (self.flops, flops, "FLOPs a step")):
            if count > most:
                raise UserError(f"it has {count:.2g} {unit}, and eager torch runs on the host up to {most:.2g}")
        function, forms = self.function, list[str]()
        tensors = [*function.module.parameters(), *function.module.buffers()]
        if function.compute_dtype not in (None, "float32") or any(_is_narrow(tensor.dtype) for tensor in tensors):
            forms.append("in float32")
        if function.attention != "plain":
            forms.append("with plain attention")
        if function.quantize is not None:
            forms.append("without matmuls of 8 bits")
        if function.drops_tokens:
            forms.append("with room for every token at its experts")
        return dataclasses.replace(self, form=", ".join(forms))

    def host_module(self, seed: int) -> Any:
        """Return the module with weights on the host: one built by `rebuild`, the user's own, or a copy.

        The user's own is returned if all its tensors are on the host. A copy has small random weights of the seed.

        Raises `UserError` for a module whose computed buffers have no values, and for one that cannot be copied.
        """
        if self.eager.rebuild is not None:
            return self.eager.rebuild(seed)
        module = self.function.module
        tensors = [*module.parameters(), *module.buffers()]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return module
        unknown = [
            f"{prefix}.{key}" if prefix else key
            for prefix, child in module.named_modules()
            for key in child._non_persistent_buffers_set
            if (buffer := child._buffers.get(key)) is not None and buffer.device.type == "meta"
        ]
        if unknown:
            raise UserError(
                f"the buffer `{unknown[0]}` is on the meta device and in no checkpoint, so it has no values"
            )
        try:
            return materialised(module, seed)
        except Exception as error:  # a deep copy runs the user's code
            why = reason_of(error, 5)[:200]
            raise UserError(f"the module cannot be copied to the host ({type(error).__name__}: {why})") from error

    def inputs(self, module: Any, seed: int) -> Iterator[Mapping[str, Any]]:
        """Yield batches to try, with floats of at least 32 bits.

        If the module was traced with examples, the first batch has whole numbers that cover their range. Plausible
        values follow, then the examples if all of them have values.
        """
        examples = self.eager.examples
        batch = {key: _wide(value) for key, value in self.make_batch(seed).items()}
        real = {key: _wide(host_array(value)) for key, value in examples.items() if value.device.type != "meta"}
        if examples:
            yield {key: _covering(value, real.get(key), module, seed) for key, value in batch.items()}
        yield batch
        if real.keys() >= batch.keys():
            yield {key: real[key] for key in batch}

    def run(self, module: Any, batch: Mapping[str, Any], double: bool = False) -> _Results:
        """Run `module` in eager torch and restore it; a parameter without a gradient has a gradient of zeros.

        In training the result is the mean loss of all parts in float64; otherwise there are no gradients. Floats below
        32 bits are widened to 32, and with `double` all floats to 64.

        Raises `UserError` if the module does not run.
        """
        import torch

        with unchanged(module):
            if double:
                module.double()
            elif any(_is_narrow(tensor.dtype) for tensor in (*module.parameters(), *module.buffers())):
                module.float()
            self.eager.prepare(module)
            if not self.training:
                with torch.no_grad():
                    return _arrays(self._call(module, batch)), {}, _buffers_of(module)
            named = {name: p for name, p in module.named_parameters() if p.requires_grad}
            mean, gradients = 0.0, dict[str, Any]()
            parts = self.microbatches * self.groups
            for part in self._parts(batch):
                with torch.enable_grad():
                    loss, part_gradients = self._call(module, part, named)
                mean = mean + loss.detach().double() / parts
                for name, gradient in part_gradients.items():
                    gradients[name] = gradients.get(name, 0) + gradient / parts
            return _arrays(mean), {name: host_array(value) for name, value in gradients.items()}, _buffers_of(module)

    def _call(self, module: Any, batch: Mapping[str, Any], named: Mapping[str, Any] | None = None) -> Any:
        """Return the module's result, or the loss and the gradients of `named`, parameters by name, if it is given.

        Raises `UserError` if the user's code fails.
        """
        try:
            out = self.eager.call(module, batch)
            return out if named is None else (out, _gradients(out, named))
        except Exception as error:
            why = reason_of(error, 5)[:200]
            raise UserError(f"it does not run on the host ({type(error).__name__}: {why})") from error

    def run_traced(self, module: Any, batch: Mapping[str, Any], double: bool = False) -> _Results:
        """Run the traced step on the weights of `module`, with the results of `run`.

        Attention is plain, and experts have room for every token.
        Computation is in the dtype of the weights, which have 32 bits, or 64 with `double`. Names of the results are
        those of the module's tensors.
        """
        import jax
        import numpy as np

        function = self.function
        own = _tensors_of(module)

        def values(names: Any) -> dict[str, Any]:
            arrays = {name: [widened(host_array(own[key])) for key in function._members(name)] for name in names}
            return {name: np.stack(each) if name in function.members else each[0] for name, each in arrays.items()}

        def parts_of(name: str, value: Any) -> dict[str, Any]:
            names = function._members(name)
            return dict(zip(names, value, strict=True)) if name in function.members else {names[0]: value}

        def widened(array: Any) -> Any:
            value = _wide(array)
            return value.astype(np.float64) if double and value.dtype == np.float32 else value

        buffers = values(function.buffers)
        with function.as_eager(double), jax.enable_x64(double):
            given = (values(function.params), dict(batch), *([buffers] if buffers else []))
            result, updated = jax.device_get(jax.jit(lambda *args: self.step(*args))(*given))
        after = {name: _wide(value) for name, value in _buffers_of(module).items()}
        given_back = {
            k: v for name in updated.keys() - function.frozen for k, v in parts_of(name, updated[name]).items()
        }
        after |= {
            alias: value for key, value in given_back.items() for alias in _aliases(module, own[key])
        } | given_back
        if not self.training:
            return result, {}, after
        first, gradients = _first_names(module), dict[str, Any]()
        for name, value in result[1].items():
            for key, part in parts_of(name, value).items():
                # Two copies of one tensor are trained apart: the second has a name that torch does not list.
                gradients[key if first[key] in gradients else first[key]] = part
        return result[0], gradients, after

    def _parts(self, batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the parts of the batch in the order of the traced step: a microbatch has every n-th row."""
        if self.microbatches * self.groups == 1:
            yield batch
            return
        for number in range(self.microbatches):
            rows = {key: value[number :: self.microbatches] for key, value in batch.items()}
            for group in range(self.groups):
                size = {key: value.shape[0] // self.groups for key, value in rows.items()}
                yield {key: value[group * size[key] : (group + 1) * size[key]] for key, value in rows.items()}


def host_tensor(array: Any, dtype: Any) -> Any:
    """Return a torch tensor with the values of a numpy array: whole numbers and flags in `dtype`, floats with at least
    32 bits.
    """
    import torch

    value = torch.tensor(_wide(array))
    return value if value.is_floating_point() else value.to(dtype)


def _wide(array: Any) -> Any:
    """Return a host array with floats of at least 32 bits."""
    import numpy as np

    value = np.asarray(array)
    return value.astype(np.float32) if value.dtype.name in ("bfloat16", "float16") else value


def _is_narrow(dtype: Any) -> bool:
    """Return True for a float dtype below 32 bits."""
    return dtype.is_floating_point and dtype.itemsize < 4


def first_tensor(out: Any) -> Any:
    """Return the first tensor in a module's output, which must have one."""
    return named_tensors(out)[0][1]


def closed_types(out: Any) -> list[str]:
    """Return the names of types in a module's output that have tensors, and that torch's pytrees do not open."""
    import torch
    from torch.utils import _pytree

    def tensors(leaf: Any) -> bool:
        """Return True if an attribute of an object is a tensor."""
        names = [*getattr(leaf, "__dict__", ()), *getattr(leaf, "__dataclass_fields__", ())]
        return any(isinstance(getattr(leaf, name, None), torch.Tensor) for name in names)

    leaves = [leaf for leaf in _pytree.tree_leaves(out) if not isinstance(leaf, torch.Tensor | type)]
    return [type(leaf).__name__ for leaf in leaves if tensors(leaf)]


def named_tensors(out: Any) -> list[tuple[str, Any]]:
    """Return the tensors of a result in torch or JAX with their paths, such as `hidden_states.0`.

    A single tensor has an empty path. None entries are left out before the entries of a list are counted. Entries
    without a shape are left out too.
    """
    if isinstance(out, Mapping):
        pairs = list(out.items())
    elif isinstance(out, tuple | list):
        pairs = list(enumerate(each for each in out if each is not None))
    else:
        return [("", out)] if hasattr(out, "shape") else []
    return [
        (f"{key}.{name}" if name else str(key), leaf) for key, value in pairs for name, leaf in named_tensors(value)
    ]


@contextlib.contextmanager
def unchanged(module: Any) -> Iterator[None]:
    """Restore the buffers, attributes and modes of `module` on exit, and the tensors and gradients of its parameters.

    Buffers get their values back. Parameters get their former `data`, whose in-place changes remain.
    """
    values = [(tensor, tensor.detach().clone()) for tensor in module.buffers() if tensor.device.type != "meta"]
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in module.parameters()]
    try:
        with preserved(module):
            yield
    finally:
        for tensor, value in values:
            tensor.detach().copy_(value)
        for parameter, data, gradient in parameters:
            parameter.data, parameter.grad = data, gradient


def _arrays(out: Any) -> Any:
    """Convert a result of torch to host arrays by path, or to one array if it is one tensor."""
    named = {name: host_array(leaf) for name, leaf in named_tensors(out)}
    return named.get("", named)


def _gradients(loss: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gradients of `loss` by name as torch tensors, with zeros for a parameter that has none."""
    import torch

    try:
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    except RuntimeError as error:
        # A re-entrant checkpoint of torch supports only `backward`.
        if "use_reentrant" not in str(error):
            raise
        for parameter in named.values():
            parameter.grad = None
        loss.backward()
        gradients = [parameter.grad for parameter in named.values()]
    pairs = zip(named.items(), gradients, strict=True)
    return {name: torch.zeros_like(p) if value is None else value.detach() for (name, p), value in pairs}


def _buffers_of(module: Any) -> dict[str, Any]:
    """Return all buffers of a module as host arrays, by name."""
    return {name: host_array(value) for name, value in module.named_buffers(remove_duplicate=False)}


def _aliases(module: Any, buffer: Any) -> list[str]:
    """Return all names of one buffer, which has several if its module stands in several places."""
    return [name for name, each in module.named_buffers(remove_duplicate=False) if each is buffer]


def _tensors_of(module: Any) -> dict[str, Any]:
    """Return all parameters and buffers by name; a tensor with two names appears under both."""
    named = dict(module.named_parameters(remove_duplicate=False))
    return named | dict(module.named_buffers(remove_duplicate=False))


def _first_names(module: Any) -> dict[str, str]:
    """Return each parameter name -> the first name of the same parameter."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}


def _covering(value: Any, example: Any, module: Any, seed: int) -> Any:
    """Return random indices that cover the smallest embedding of `module`, with both ends and a tie, in place of
    `value`.

    An `example` of whole numbers or flags whose elements are not all equal is returned instead, in the dtype of
    `value`. Without one, these stay as they are: flags, arrays below three elements, and numbers in a module without
    embeddings. Floats always do.
    """
    import numpy as np
    import torch

    array = np.asarray(value)
    if array.dtype.kind not in "biu":
        return value
    if example is not None and example.size and example.min() != example.max():
        return example.astype(array.dtype)
    tables = [child.num_embeddings for child in module.modules() if isinstance(child, torch.nn.Embedding)]
    if array.dtype.kind == "b" or not tables or array.size < 3:
        return value
    drawn = np.random.default_rng(seed).integers(0, min(tables), array.shape).astype(array.dtype)
    drawn.reshape(-1)[:3] = 0, min(tables) - 1, min(tables) - 1
    return drawn


def materialised(module: Any, seed: int) -> Any:
    """Return a copy of `module` on the host, with random floats and codes for tensors of the meta device, else zeros.

    Matrices are scaled to keep activations near 1, and scales of norms are near 1.

    Tensors with several names are still shared in the copy.
    """
    import torch

    random = torch.Generator().manual_seed(seed)

    def real(name: str, tensor: Any) -> Any:
        """Return the values of a tensor on the host, random ones for a tensor on the meta device."""
        if tensor.device.type != "meta":
            return tensor.detach().cpu()
        if tensor.dtype == torch.int8 and isinstance(tensor, torch.nn.Parameter):  # codes of a frozen weight
            return torch.randint(-127, 128, tensor.shape, generator=random, dtype=torch.int8)
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        noise = torch.randn(tensor.shape, generator=random, dtype=torch.float32)
        if name.endswith("running_var"):
            noise = 1 + 0.1 * noise.abs()
        elif tensor.ndim >= 2:
            # Matrices are scaled by 1 / sqrt(fan-in), so that activations stay near 1.
            noise = noise * (tensor.shape[0] / max(tensor.numel(), 1)) ** 0.5
        else:
            noise = 0.1 * noise + float(is_scale(name))
        return noise.to(tensor.dtype)

    # Tensors are shared as before: each is created once, regardless of the number of its names.
    twin, created = copy.deepcopy(module), dict[int, Any]()
    for prefix, child in list(twin.named_modules()):
        for tensors in (child._parameters, child._buffers):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in created:
                    value = real(f"{prefix}.{key}", tensor)
                    if isinstance(tensor, torch.nn.Parameter):
                        value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
                    created[id(tensor)] = (tensor, value)
                tensors[key] = created[id(tensor)][1]
    return twin
