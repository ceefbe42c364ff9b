"""The mode in which a torch module is traced: evaluation, or training without dropout and noise.

A training step computes what the module computes after `module.train()`, less its dropout. Random numbers are those of
one seed in every planned step. A class that draws some in training alone (stochastic depth, say) therefore stays in
evaluation mode, with a note. It is refused if it updates buffers in training.
"""

import contextlib
import functools
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoshard.errors import UserError


class ModuleMode:
    """The mode of one module, and the classes in it that stay in evaluation mode."""

    def __init__(self, train: bool, batch_statistics: bool | None) -> None:
        """Store the mode; no module is changed.

        - `train`: True for a training step.
        - `batch_statistics`: True or False for all batch norms in training or evaluation mode. None in a training step
          leaves those in evaluation mode that the user put there alone.
        """
        self.train, self.batch_statistics = train, batch_statistics
        self.quiet: dict[type, str] = {}
        """Classes that stay in evaluation mode since they draw random numbers in training, and the place that draws."""
        self.always: set[str] = set()
        """Places that draw random numbers in evaluation mode as well."""
        self.drawn: dict[str, type] = {}
        """Places that drew random numbers in training mode in the last call, and the class in that mode."""
        self.lost: dict[type, str] = {}
        """A buffer of each such class that it wrote to in training mode."""
        self.drops = False
        """True if a call left out dropout that a function would have applied."""

    def __call__(self, module: Any) -> bool:
        """Put `module` in this mode, and return True if it has batch norms in training mode.

        Raises `UserError` for a batch norm in training mode with a cumulative average, which a step cannot compute.
        """
        if not self.train:
            return evaluation_mode(module, bool(self.batch_statistics))
        if not module.training:
            module.train()
        norms = False
        for child in module.modules():
            if is_batch_norm(child):
                asked = child.training if self.batch_statistics is None else self.batch_statistics
                child.training = asked
                norms |= asked
                _check_average(child)
            else:
                child.training = child.training and (self._trains(type(child)) or _updates_buffers(child))
        return norms

    def _trains(self, kind: type) -> bool:
        """Return True if a module of this class may be in training mode.

        Classes of torch and transformers differ in dropout, noise and checkpoints alone, but for `_updates_buffers`.
        """
        return kind not in self.quiet and not _is_of_torch(kind)

    def asking(self, module: Any) -> dict[type, None]:
        """Return the classes that read `training` and have a module that this mode leaves in training mode."""
        kinds = dict.fromkeys(type(child) for child in module.modules() if child.training)
        return {kind: None for kind in kinds if self._trains(kind) and reads_training(kind)}

    @contextlib.contextmanager
    def noiseless(self, module: Any) -> Iterator[None]:
        """Leave out dropout in training mode while inside, and record in `drawn` all random numbers of training.

        Nothing happens in evaluation mode, and for a module without a class that reads `training`.
        """
        self.drawn = {}
        if not self.train or not (self.asking(module) or self.quiet):
            yield
            return
        import numpy as np

        before = random.getstate(), np.random.get_state(legacy=False)
        try:
            with _noiseless_type()(self):
                yield
        finally:
            states = before[0] != random.getstate(), str(before[1]) != str(np.random.get_state(legacy=False))
            if any(states):
                # One seed chooses for every trace, so that plans are deterministic.
                random.setstate(before[0])
                np.random.set_state(before[1])
                self.drawn |= {f" by {_GENERATORS[states[1]]}": kind for kind in self.asking(module)}

    def draw(self) -> None:
        """Record that the calling code draws a random number, unless it does so in evaluation mode too."""
        frame: types.FrameType | None = sys._getframe(2)
        place = ""
        while frame is not None:
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            kind = type(owner)
            if hasattr(kind, "register_buffer") and not _is_of_torch(kind):
                place = place or f" at {Path(code.co_filename).name}:{frame.f_lineno}"
                if kind in self.quiet and self.quiet[kind] == place:
                    self.always.add(place)
                    del self.quiet[kind]
                    self.drawn[place] = kind
                    return
                if getattr(owner, "training", False) and reads_training(kind):
                    if place not in self.always:
                        self.drawn[place] = kind
                    return
            frame = frame.f_back

    def settle(self, written: set[str], module: Any, label: str) -> bool:
        """Put classes that drew random numbers in training mode in evaluation mode; return True if the mode changed.

        - `written`: names of the buffers that the last call wrote to.
        - `label`: name of the module in errors.

        Raises `UserError` if there are no more, and one of these classes wrote to its buffers in training mode.
        """
        drawn, self.drawn = self.drawn, {}
        for kind, name in self.lost.items():
            if not drawn and kind in self.quiet:
                raise UserError(
                    f"`{label}` could not be lowered: in training `{kind.__name__}` updates its buffer `{name}` and "
                    f"draws random numbers{self.quiet[kind]}. Every planned step would draw the same ones: give them "
                    "as an input, or put this module in evaluation mode."
                )
        for place, kind in drawn.items():
            if place in self.always:
                continue
            self.quiet.setdefault(kind, place)
            for path, child in module.named_modules():
                names = [f"{path}.{key}" if path else key for key in child._buffers if type(child) is kind]
                for name in written.intersection(names):
                    self.lost[kind] = min(name, self.lost.get(kind, name))
        return bool(drawn)

    def notes(self) -> list[str]:
        """Return the sentences on what the traced step leaves out."""
        found = [
            f"`{kind.__name__}` runs in evaluation mode: in training it draws random numbers{place}, which would be "
            "the same ones in every planned step."
            for kind, place in self.quiet.items()
        ]
        return [*(["Dropout is off in the planned step."] if self.drops else []), *found]


_GENERATORS = ("Python's `random`", "numpy")


@functools.cache
def _noiseless_type() -> type:
    """Return the class of torch function modes that leave out dropout and record draws of random numbers."""
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    dropouts = {getattr(functional, name) for name in names}
    plain = {torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout}
    draws = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like}
    draws |= {torch.randint_like, torch.bernoulli, torch.multinomial, torch.normal, torch.poisson}
    draws |= {functional.gumbel_softmax, functional.rrelu, torch.Tensor.bernoulli, torch.Tensor.multinomial}
    in_place = ("bernoulli", "normal", "uniform", "exponential", "random", "geometric", "cauchy", "log_normal")
    draws |= {getattr(torch.Tensor, f"{name}_") for name in in_place}

    class Noiseless(TorchFunctionMode):
        """A torch function mode that leaves out dropout and tells its `ModuleMode` of random numbers."""

        def __init__(self, mode: ModuleMode) -> None:
            super().__init__()
            self.mode = mode

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Call `func` without dropout, or return its input if it is dropout."""
            given = dict(kwargs or {})
            if func in dropouts or func in plain:
                trains = given.get("training", given.get("train", args[2] if len(args) > 2 else func in dropouts))
                self.mode.drops |= bool(trains)
                return args[0] if args else given["input"]
            if func is functional.scaled_dot_product_attention:
                args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
                given |= {"dropout_p": 0.0} if "dropout_p" in given else {}
            elif func is functional.multi_head_attention_forward:
                given["training"] = False
            elif func in draws:
                self.mode.draw()
            return func(*args, **given)

    return Noiseless


def evaluation_mode(module: Any, batch_statistics: bool) -> bool:
    """Put `module` in evaluation mode, except batch norms if `batch_statistics`; return True if there are such.

    Raises `UserError` for a batch norm in training mode with a cumulative average, which a step cannot compute.
    """
    module.eval()
    norms = [child for child in module.modules() if is_batch_norm(child)] if batch_statistics else []
    for norm in norms:
        norm.train()
        _check_average(norm)
    return bool(norms)


def _check_average(norm: Any) -> None:
    """Raise `UserError` for a batch norm in training mode with a cumulative average."""
    if norm.training and norm.momentum is None:
        raise UserError("a batch norm with `momentum=None` (a cumulative average) is not supported; give it a number.")


def is_batch_norm(module: Any) -> bool:
    """Return True for a batch norm."""
    import torch

    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def _updates_buffers(module: Any) -> bool:
    """Return True for a module of torch that updates buffers in training: spectral norms and running instance norms."""
    import torch
    from torch.nn.utils.spectral_norm import SpectralNorm

    kinds = (torch.nn.modules.instancenorm._InstanceNorm, torch.nn.utils.parametrizations._SpectralNorm)
    return isinstance(module, kinds) or any(
        isinstance(each, SpectralNorm) for each in module._forward_pre_hooks.values()
    )


def _is_of_torch(kind: type) -> bool:
    """Return True for a class of torch or transformers."""
    return kind.__module__.partition(".")[0] in ("torch", "transformers")


@functools.cache
def reads_training(kind: type) -> bool:
    """Return True if a method of the class, or a function that it calls by name, has an attribute named `training`."""
    pending: list[Any] = [value for base in kind.__mro__ if base is not object for value in _methods(base)]
    seen: set[Any] = set()
    while pending:
        value = pending.pop()
        code = value if isinstance(value, types.CodeType) else getattr(value, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        if "training" in code.co_names:
            return True
        pending += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        named = [getattr(value, "__globals__", {}).get(name) for name in code.co_names]
        pending += [each for each in named if isinstance(each, types.FunctionType) and not _is_of_torch_code(each)]
    return False


def _methods(base: type) -> list[Any]:
    """Return the functions in the body of a class, without decorators; none for a class of torch."""
    if _is_of_torch(base):
        return []
    found: list[Any] = []
    for value in vars(base).values():
        inner = getattr(value, "__func__", getattr(value, "fget", value))
        while hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        found.append(inner)
    return found


def _is_of_torch_code(function: types.FunctionType) -> bool:
    """Return True for a function of torch or transformers."""
    return (function.__module__ or "").partition(".")[0] in ("torch", "transformers")
