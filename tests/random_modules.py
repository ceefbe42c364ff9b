"""Random torch modules, the same for the same seed: layers in a list, with all kinds of attributes that affect a layer.

A module is a `Recipe`, one word for each feature that it has; an empty word is a feature that it lacks.
`tests/random_module_runs.py` reduces a failing recipe to the few words that matter.
"""

import dataclasses
import enum
import functools
import random
import types
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


WIDTH, BATCH, LENGTH, ROWS = 8, 8, 4, 12


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One module; the words of each field are in `WORDS`."""

    seed: int
    layers: int = 2
    container: str = "list"
    body: str = "linear"
    attribute: str = ""
    """Type of the attribute that scales a layer's result."""
    settings: str = ""
    """Differences of the layers in it: all `equal`, all `differ`, only the `last`; `private` and differing."""
    position: str = ""
    shared: str = ""
    frozen: str = ""
    hooks: str = ""
    override: str = ""
    buffers: str = ""
    writes: str = ""
    course: str = "chain"
    adapters: str = ""
    inputs: str = "floats"
    extra: str = ""

    @property
    def words(self) -> dict[str, str]:
        """The features that differ from those of a plain chain of linear layers."""
        plain = Recipe(self.seed)
        fields = [field.name for field in dataclasses.fields(self) if field.name != "seed"]
        return {name: str(getattr(self, name)) for name in fields if getattr(self, name) != getattr(plain, name)}

    def __str__(self) -> str:
        return f"seed {self.seed}: " + (", ".join(f"{key} {value}" for key, value in self.words.items()) or "plain")


class Kind(enum.Enum):
    """Values of layers as an enumeration."""

    FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH = 0.25, 0.5, 0.75, 1.0, 1.25, 1.5


@dataclasses.dataclass
class Setting:
    """Values of layers as a configuration."""

    power: float


class Plain:
    """An object of an unknown class."""

    def __init__(self, value: float) -> None:
        self.value = value

    def times(self, x: Any) -> Any:
        return x * self.value


def closure(value: float) -> Callable[[Any], Any]:
    def scale(x: Any) -> Any:
        return x * value

    return scale


def frozen_linear(value: float) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    nn.init.constant_(layer.bias, value)
    return layer.requires_grad_(False)


def quarters(value: float) -> int:
    return round(4 * value)


ATTRIBUTES: dict[str, tuple[Callable[[float], Any], Callable[[Any, Any], Any]]] = {
    "int": (quarters, lambda y, s: y * s),
    "float": (float, lambda y, s: y * s),
    "bool": (lambda v: v > 0.5, lambda y, s: y * 0.5 if s else y),
    "str": (lambda v: "x" * quarters(v), lambda y, s: y * len(s)),
    "None": (lambda v: None if v > 0.5 else 0.1, lambda y, s: y if s is None else y * s),
    "tuple": (lambda v: (1, v), lambda y, s: y * s[1]),
    "list": (lambda v: [1, v], lambda y, s: y * s[1]),
    "size": (lambda v: torch.Size([quarters(v)]), lambda y, s: y * s[0]),
    "tensor": (torch.tensor, lambda y, s: y * s),
    "tensor of numbers": (lambda v: torch.full((WIDTH,), v), lambda y, s: y + s),
    "list of tensors": (lambda v: [torch.tensor(v), torch.tensor(1.0)], lambda y, s: y * s[0] + s[1]),
    "dict of tensors": (lambda v: {"scale": torch.tensor(v)}, lambda y, s: y * s["scale"]),
    "numpy scalar": (np.float32, lambda y, s: y * s),
    "numpy double": (np.float64, lambda y, s: y * s),
    "numpy array": (lambda v: np.full(WIDTH, v, np.float32), lambda y, s: y * torch.as_tensor(s)),
    "numpy integer": (lambda v: np.int64(quarters(v)), lambda y, s: y * int(s)),
    "dict": (lambda v: {"scale": v}, lambda y, s: y * s["scale"]),
    "nested dict": (lambda v: {"a": {"b": [v]}}, lambda y, s: y * s["a"]["b"][0]),
    "dataclass": (Setting, lambda y, s: y * s.power),
    "namespace": (lambda v: types.SimpleNamespace(power=v), lambda y, s: y * s.power),
    "object": (Plain, lambda y, s: s.times(y)),
    "bound method": (lambda v: Plain(v).times, lambda y, s: s(y)),
    "enum": (Kind, lambda y, s: y * s.value),
    "dtype": (lambda v: torch.bfloat16 if v > 0.5 else torch.float32, lambda y, s: y * torch.finfo(s).bits / 32),
    "slice": (lambda v: slice(0, quarters(v)), lambda y, s: torch.cat([y[..., s] * 2, y[..., s.stop :]], -1)),
    "set": (lambda v: {quarters(v)}, lambda y, s: y * max(s)),
    "frozenset": (lambda v: frozenset([quarters(v)]), lambda y, s: y * max(s)),
    "range": (lambda v: range(quarters(v)), lambda y, s: y * len(s)),
    "bytes": (lambda v: bytes([quarters(v)]), lambda y, s: y * s[0]),
    "complex": (lambda v: complex(v, 1), lambda y, s: y * s.real),
    "Fraction": (lambda v: Fraction(quarters(v), 4), lambda y, s: y * float(s)),
    "partial": (lambda v: functools.partial(nn.functional.leaky_relu, negative_slope=v), lambda y, s: s(y)),
    "lambda": (lambda v: lambda x: x * v, lambda y, s: s(y)),
    "closure": (closure, lambda y, s: s(y)),
    "function": (lambda v: torch.tanh if v > 0.5 else torch.sin, lambda y, s: s(y)),
    "module in a list": (lambda v: [frozen_linear(v)], lambda y, s: s[0](y)),
    "module in a dict": (lambda v: {"inner": frozen_linear(v)}, lambda y, s: s["inner"](y)),
    "unregistered module": (frozen_linear, lambda y, s: s(y)),
    "activation": (lambda v: nn.LeakyReLU(v), lambda y, s: s(y)),
}
"""Type of an attribute -> how it is built from a number, and how a layer's result depends on it."""

BODIES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "mlp": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.RMSNorm(WIDTH)),
    "norms": lambda: nn.Sequential(nn.GroupNorm(2, LENGTH), nn.Linear(WIDTH, WIDTH)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)),
    "conv": lambda: nn.Conv1d(LENGTH, LENGTH, 3, padding=1),
    "groups": lambda: nn.Conv1d(LENGTH, LENGTH, 3, padding=1, groups=2),
    "attention": lambda: Attention(),
    "torch's attention": lambda: SelfAttention(),
    "experts": lambda: Experts(),
}

WORDS: dict[str, tuple[str, ...]] = {
    "container": ("list", "sequential", "dict", "named dict", "nested list", "attributes"),
    "body": (*BODIES, "linear/mlp", "attention/conv"),
    "attribute": ("", *ATTRIBUTES),
    "settings": ("equal", "differ", "differ", "differ", "last", "private", "nested", "alternate"),
    "position": ("", "held", "if", "modulo", "divide", "alternate", "named otherwise", "private"),
    "shared": (
        *(
            "",
            "submodule by all",
            "submodule by two",
            "same layer",
            "same layer twice",
            "two names",
            "name before",
            "inner names",
        ),
        *("weight by all", "weight by two", "tied head", "buffer by all", "held list"),
    ),
    "frozen": ("", "first", "last", "middle", "one weight", "weights of one layer", "all biases", "all", "in a list"),
    "hooks": ("", "pre", "post", "post differ", "inside", "root", "one layer", "recording", "kwargs", "weight norm"),
    "override": ("", "method", "partial", "lambda", "one layer", "inside", "one differs"),
    "buffers": (
        *("", "read", "read differ", "transient", "transient differ", "counter", "running", "reassigned", "step"),
        *("cumulative", "written by net", "read by net"),
    ),
    "writes": (
        *("", "residual", "view", "row", "strided", "clone", "mask", "kept view", "kept across", "kept list", "out"),
        "zeros",
    ),
    "course": (
        *("chain", "twice", "reversed", "scaled", "collect", "skip", "unet", "exit", "first input", "period"),
        *("stop gradient", "side output", "indexed", "slices", "early zero"),
    ),
    "adapters": ("", "equal", "scaling differs", "some layers", "adapters alone"),
    "inputs": ("floats", "ids", "two", "keyword"),
    "extra": ("", "checkpoint", "cast", "no grad", "shared kwargs", "tuple"),
}
"""The words of each feature; the first is that of a plain module."""


def random_recipe(seed: int) -> Recipe:
    """Draw about three features beyond a chain of layers that have an attribute."""
    draw = random.Random(f"module {seed}")
    words: dict[str, Any] = {"layers": draw.choice((2, 3, 4, 4, 6))}
    features = [name for name in WORDS if name != "settings"]
    for name in draw.sample(features, draw.choice((1, 2, 2, 3, 3, 4, 5))):
        words[name] = draw.choice(WORDS[name][1:])
    if "attribute" not in words and draw.random() < 0.4:
        words["attribute"] = draw.choice(WORDS["attribute"][1:])
    if "attribute" in words:
        words["settings"] = draw.choice(WORDS["settings"])
    return allowed(Recipe(seed, **words))


def allowed(recipe: Recipe) -> Recipe:
    """Replace the features that cannot be combined in torch."""
    change: dict[str, Any] = {}
    if recipe.container == "sequential" and (recipe.course != "chain" or recipe.inputs == "keyword"):
        change["container"] = "list"
    if recipe.attribute == "" or recipe.settings == "":
        change |= {"settings": "" if recipe.attribute == "" else "equal"}
    if recipe.shared == "tied head" and recipe.inputs != "ids":
        change["inputs"] = "ids"
    if recipe.adapters == "adapters alone" and recipe.frozen:
        change["frozen"] = ""
    if recipe.adapters == "adapters alone" and recipe.override in ("method", "lambda"):
        change["override"] = "partial"
    if recipe.hooks == "kwargs" and recipe.inputs == "two":
        change["inputs"] = "keyword"
    if recipe.writes == "residual" and recipe.extra == "checkpoint":
        change["extra"] = ""
    return dataclasses.replace(recipe, **change)


class Attention(nn.Module):
    """Two heads, fused projections."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class SelfAttention(nn.Module):
    """torch's own module of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.inner(x, x, x, need_weights=False)[0]


class Experts(nn.Module):
    """Two experts in a list of their own, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Any) -> Any:
        weights = self.gate(x).softmax(-1)
        return sum(expert(x) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))


class Adapter(nn.Module):
    """A low-rank update whose scale is in a dict, as in PEFT."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.scaling = {"default": scale}

    def forward(self, x: Any) -> Any:
        return self.up(self.down(x)) * self.scaling["default"]


class Inner(nn.Module):
    """An object with an attribute, one level further inside."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.__dict__["setting"] = value
        self.project = nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    """One layer of a random module: a residual around a body, changed by the recipe's features."""

    def __init__(self, recipe: Recipe, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.attribute, self.settings, self.position = recipe.attribute, recipe.settings, recipe.position
        self.shared, self.buffers_used, self.writes = recipe.shared, recipe.buffers, recipe.writes
        self.adapters, self.extra = recipe.adapters, recipe.extra
        self.body = BODIES[_body(recipe, number)]()
        if recipe.position == "named otherwise":
            self.place = number
        if recipe.position == "private":
            self._index = number
        if recipe.attribute:
            self._set(recipe, number)
        if recipe.adapters and (recipe.adapters != "some layers" or number % 2):
            self.adapter = Adapter(0.5 * (number + 1) if recipe.adapters == "scaling differs" else 0.5)
        if recipe.shared == "inner names":
            self.norm = self.again = nn.LayerNorm(WIDTH)
        if recipe.buffers.startswith(("read", "transient")) and recipe.buffers != "read by net":
            value = torch.randn(WIDTH) if "differ" in recipe.buffers or recipe.buffers == "read" else torch.ones(WIDTH)
            self.register_buffer("shift", value, persistent=not recipe.buffers.startswith("transient"))
        if recipe.buffers in ("counter", "step"):
            self.register_buffer("count", torch.tensor(number if recipe.buffers == "counter" else 0))
        if recipe.buffers in ("running", "reassigned", "cumulative"):
            self.register_buffer("mean", torch.full((WIDTH,), 0.1 * number))

    def _set(self, recipe: Recipe, number: int) -> None:
        place = {"equal": 1, "last": int(number == recipe.layers - 1), "alternate": number % 2}
        value = ATTRIBUTES[recipe.attribute][0](0.25 * (1 + place.get(recipe.settings, number)))
        if recipe.settings == "private":
            object.__setattr__(self, "_setting", value)
        elif recipe.settings == "nested":
            self.inner = Inner(value)
        elif recipe.attribute == "activation":
            self.setting = value
        else:
            self.__dict__["setting"] = value

    def _scaled(self, y: Any) -> Any:
        use = ATTRIBUTES[self.attribute][1]
        if self.settings == "private":
            return use(y, self._setting)
        if self.settings == "nested":
            return use(self.inner.project(y), self.inner.setting)
        return use(y, self.setting)

    def _placed(self, y: Any) -> Any:
        match self.position:
            case "if":
                return y * 0.1 if self.layer_idx >= 1 else y
            case "modulo":
                return torch.relu(y) if self.layer_idx % 2 else y
            case "divide":
                return y / (self.layer_idx + 1)
            case "alternate":
                return y.flip(1) if self.layer_idx % 2 == 0 else y
            case "named otherwise":
                return y * (self.place + 1)
            case "private":
                return y * (self._index + 1)
        return y

    def _buffered(self, y: Any) -> Any:
        match self.buffers_used:
            case "read" | "read differ" | "transient" | "transient differ":
                return y + self.shift
            case "counter":
                self.count += 1
                return y * (1 + 0.1 * self.count)
            case "step":
                y = y / (1 + self.count)
                self.get_buffer("count").add_(2)
                return y
            case "running":
                self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
                return y - self.mean
            case "reassigned":
                self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
                return y - self.mean
            case "cumulative":
                y = y - self.mean
                self.mean[: WIDTH // 2] += y.detach().amax((0, 1))[: WIDTH // 2]
                return y
        return y

    def _written(self, y: Any) -> Any:
        match self.writes:
            case "view":
                y = y.clone()
                y[..., : WIDTH // 2].mul_(0.5)
            case "row":
                y = y * 1
                y[:, 0] = y[:, 1] * 2
            case "strided":
                y = y.contiguous() * 1.0
                y.view(-1)[::3] += 1.0
            case "clone":
                before = y.clone()
                y = y.mul(2)
                y.add_(before)
            case "mask":
                y = y.masked_fill(y < 0, 0.1)
                y.transpose(0, 1)[1].zero_()
            case "kept view":
                y = y * 1
                self.cache = y.view(-1, WIDTH)
                y.mul_(0.5)
                y = y + self.cache.view(y.shape)
            case "out":
                y = torch.add(y, y.detach()) * 1
                y[0].copy_(y[1].detach())
            case "zeros":
                room = torch.zeros_like(y)
                room[:, 1:] = y[:, :-1]
                room[:, :1] += y[:, -1:]
                y = room
        return y

    def forward(self, x: Any, shift: Any = None) -> Any:
        if self.extra == "tuple" and isinstance(x, tuple):
            x = x[0]
        y = torch.tanh(self.body(x))
        if self.adapters and hasattr(self, "adapter"):
            y = y + self.adapter(x)
        if self.attribute:
            y = self._scaled(y)
        if self.shared == "inner names":
            y = self.again(self.norm(y))
        if self.shared in ("submodule by all", "submodule by two", "held list") and hasattr(self, "common"):
            y = (self.common[0] if isinstance(self.common, list) else self.common)(y)
        if self.shared == "buffer by all":
            y = y * self.get_buffer("table")
        y = self._written(self._buffered(self._placed(y)))
        if shift is not None:
            y = y + shift
        if self.extra == "cast":
            y = y.to(torch.float64).float().to(x.dtype)
        if self.writes == "residual":
            y = y * 1
            y += x
            return y
        return (x + y,) if self.extra == "tuple" else x + y


class Net(nn.Module):
    """A list of such layers, with an input stage before it and a head after it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.words = recipe
        layers = [Layer(recipe, number) for number in range(recipe.layers)]
        if recipe.shared == "same layer":
            layers = [layers[0]] * recipe.layers
        if recipe.shared == "same layer twice":
            layers[-1] = layers[0]
        if recipe.shared == "name before":
            self.again = layers[-1]
        self._contain(recipe, layers)
        if recipe.inputs == "ids":
            self.embed = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=recipe.shared != "tied head")
        if recipe.buffers == "written by net":
            self.register_buffer("calls", torch.zeros(()))
        if recipe.buffers == "read by net":
            self.register_buffer("offset", torch.randn(LENGTH, WIDTH))
        self._share(recipe, layers)
        self._freeze(recipe, layers)
        self._hook(recipe, layers)
        self._override(recipe, layers)
        self.seen: list[Any] = []

    def _contain(self, recipe: Recipe, layers: list[Layer]) -> None:
        match recipe.container:
            case "sequential":
                self.layers = nn.Sequential(*layers)
            case "dict":
                self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
            case "named dict":
                self.layers = nn.ModuleDict({f"layer_{i}": layer for i, layer in enumerate(layers)})
            case "nested list":
                half = len(layers) // 2
                self.layers = nn.ModuleList([nn.ModuleList(layers[:half]), nn.ModuleList(layers[half:])])
            case "attributes":
                for i, layer in enumerate(layers):
                    setattr(self, f"layer{i}", layer)
            case _:
                self.layers = nn.ModuleList(layers)

    def ordered(self) -> list[Any]:
        match self.words.container:
            case "dict" | "named dict":
                return list(self.layers.values())
            case "nested list":
                return [layer for part in self.layers.children() for layer in part.children()]
            case "attributes":
                return [getattr(self, f"layer{i}") for i in range(self.words.layers)]
        return list(self.layers)

    def _share(self, recipe: Recipe, layers: list[Layer]) -> None:
        match recipe.shared:
            case "submodule by all":
                common = nn.Linear(WIDTH, WIDTH)
                for layer in layers:
                    layer.common = common
            case "submodule by two":
                layers[0].common = layers[-1].common = nn.Linear(WIDTH, WIDTH)
            case "held list":
                common = [frozen_linear(0.1)]
                for layer in layers:
                    layer.common = common
            case "two names":
                self.again = layers[0]
            case "weight by all" | "weight by two":
                first, *others = [next(m for m in layer.modules() if hasattr(m, "weight")) for layer in layers]
                for other in others if recipe.shared == "weight by all" else others[-1:]:
                    if other.weight.shape == first.weight.shape:
                        other.weight = first.weight
            case "tied head":
                self.head.weight = self.embed.weight
            case "buffer by all":
                table = torch.rand(WIDTH) + 0.5
                for layer in layers:
                    layer.register_buffer("table", table)

    def _freeze(self, recipe: Recipe, layers: list[Layer]) -> None:
        chosen: list[Any] = []
        match recipe.frozen:
            case "first":
                chosen = [layers[0]]
            case "last":
                chosen = [layers[-1]]
            case "middle":
                chosen = layers[1:-1] or [layers[-1]]
            case "in a list":
                chosen = layers[: len(layers) // 2 + 1]
            case "weights of one layer":
                for parameter in layers[-1].parameters():
                    if parameter.ndim > 1:
                        parameter.requires_grad_(False)
            case "one weight":
                next(layers[len(layers) // 2].parameters()).requires_grad_(False)
            case "all biases":
                for name, parameter in self.named_parameters():
                    parameter.requires_grad_(not name.endswith("bias"))
            case "all":
                chosen = list(layers)
        for layer in chosen:
            layer.requires_grad_(False)
        if recipe.adapters == "adapters alone":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("adapter" in name)

    def _hook(self, recipe: Recipe, layers: list[Layer]) -> None:
        def halve(module: Any, args: Any, out: Any) -> Any:
            return out[0] * 0.5 if isinstance(out, tuple) else out * 0.5

        def record(module: Any, args: Any, out: Any) -> None:
            module.last_shape = out[0].shape

        match recipe.hooks:
            case "pre":
                for layer in layers:
                    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
            case "post":
                for layer in layers:
                    layer.register_forward_hook(halve)
            case "post differ":
                for i, layer in enumerate(layers):
                    layer.register_forward_hook(lambda module, args, out, i=i: _first(out) * (1 + i))
            case "inside":
                for layer in layers:
                    layer.body.register_forward_hook(halve)
            case "root":
                self.register_forward_hook(halve)
            case "one layer":
                layers[-1].register_forward_hook(halve)
            case "recording":
                for layer in layers:
                    layer.register_forward_hook(record)
            case "kwargs":
                for layer in layers:
                    layer.register_forward_pre_hook(
                        lambda module, args, kwargs: (args, kwargs | {"shift": torch.ones(WIDTH)}), with_kwargs=True
                    )
            case "weight norm":
                for layer in layers:
                    inner = next(m for m in layer.modules() if isinstance(m, nn.Linear | nn.Conv1d))
                    if not hasattr(inner, "parametrizations"):
                        nn.utils.parametrizations.weight_norm(inner)

    def _override(self, recipe: Recipe, layers: list[Layer]) -> None:
        def doubled(self: Any, x: Any, shift: Any = None) -> Any:
            return x + 2 * torch.tanh(self.body(x))

        def halved(inner: Callable[..., Any], scale: float, *args: Any, **kwargs: Any) -> Any:
            return _first(inner(*args, **kwargs)) * scale

        match recipe.override:
            case "method":
                for layer in layers:
                    layer.forward = types.MethodType(doubled, layer)
            case "partial":
                for layer in dict.fromkeys(layers):
                    layer.forward = functools.partial(halved, layer.forward, 0.5)
            case "lambda":
                for layer in layers:
                    layer.forward = lambda x, shift=None, layer=layer: x + torch.relu(layer.body(x))
            case "one layer":
                layers[0].forward = types.MethodType(doubled, layers[0])
            case "one differs":
                for i, layer in enumerate(dict.fromkeys(layers)):
                    layer.forward = functools.partial(halved, layer.forward, 0.5 * (i + 1))
            case "inside":
                for layer in dict.fromkeys(layers):
                    layer.body.forward = functools.partial(halved, layer.body.forward, 0.5)

    def forward(self, x: Any, other: Any = None) -> Any:
        recipe = self.words
        if recipe.inputs == "ids":
            x = self.embed(x)
        if recipe.buffers == "written by net":
            self.calls += 1
            x = x * (1 + 0.1 * self.calls)
        if recipe.buffers == "read by net":
            x = x + self.offset
        if recipe.writes == "kept across":
            x = x * 1
            self.kept = x.view(-1)
        if recipe.container == "sequential" and recipe.extra not in ("tuple", "shared kwargs", "checkpoint"):
            x = self.layers(x)
        else:
            x = self._course(x, self._caller(other))
        if recipe.writes == "kept across":
            x = x * 1
            x.view(-1)[0] = 3.0
            x = x + self.kept.view(x.shape)
        if recipe.writes == "kept list":
            self.seen.append(x)
            x = sum(self.seen[-1:])
        return self.head(x)

    def _caller(self, other: Any) -> Callable[..., Any]:
        recipe = self.words
        shared = torch.ones(WIDTH) * 0.5 if recipe.extra == "shared kwargs" else None

        def call(layer: Any, x: Any) -> Any:
            if recipe.extra == "checkpoint":
                return checkpoint(layer, x, use_reentrant=False)
            if recipe.extra == "no grad" and layer is self.ordered()[0]:
                with torch.no_grad():
                    return layer(x)
            if recipe.inputs == "two":
                return layer(x, other)
            if recipe.inputs == "keyword":
                return layer(x, shift=other)
            return layer(x) if shared is None else layer(x, shift=shared)

        return lambda layer, x: _first(call(layer, x))

    def _course(self, x: Any, call: Callable[..., Any]) -> Any:
        layers, first = self.ordered(), x
        match self.words.course:
            case "twice":
                layers = layers * 2
            case "reversed":
                layers = layers[::-1]
            case "exit":
                layers = layers[:-1]
            case "period":
                layers = [layer for pair in zip(layers, layers, strict=True) for layer in pair]
            case "collect":
                seen = []
                for layer in layers:
                    x = call(layer, x)
                    seen.append(x)
                return sum(seen)
            case "unet":
                skips = []
                for number, layer in enumerate(layers):
                    x = call(layer, x if number < len(layers) // 2 or not skips else x + skips.pop())
                    if number < len(layers) // 2:
                        skips.append(x)
                return x
            case "side output":
                total = 0.0
                for layer in layers:
                    x = call(layer, x)
                    total = total + x.mean()
                return x + total
            case "early zero":
                for number, layer in enumerate(layers):
                    x = call(layer, x)
                    if number == 0:
                        x = torch.where(x > 0, x, torch.zeros_like(x))
                return x
            case "slices":
                for layer in layers[1:]:
                    x = call(layer, x)
                return call(layers[0], x)
        for number, layer in enumerate(layers):
            match self.words.course:
                case "scaled":
                    x = call(layer, x) * 0.9
                case "skip":
                    x = x + call(layer, x)
                case "first input":
                    x = call(layer, x) + 0.1 * first
                case "stop gradient":
                    x = call(layer, x.detach() if number == 1 else x)
                case "indexed":
                    x = call(layer, x) * (number + 1)
                case _:
                    x = call(layer, x)
        return x


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _body(recipe: Recipe, number: int) -> str:
    """Return the body of one layer: `a/b` is `a` of even layers and `b` of odd ones."""
    names = recipe.body.split("/")
    return names[number % len(names)]


def build(recipe: Recipe) -> Net:
    """Build the module of a recipe, the same each time. No weight is 0 or 1."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        net = Net(recipe)
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.ndim < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def inputs(recipe: Recipe) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Draw the inputs of a module; ids have ties and both ends."""
    random = torch.Generator().manual_seed(recipe.seed)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=random)
    if recipe.inputs == "ids":
        ids = torch.randint(0, ROWS, (BATCH, LENGTH), generator=random)
        ids[0, 0], ids[0, 1], ids[0, 2] = 0, ROWS - 1, ROWS - 1
        return (ids,), {}
    other = torch.randn(BATCH, LENGTH, WIDTH, generator=random)
    if recipe.inputs == "two":
        return (x, other), {}
    return (x,), {"other": other} if recipe.inputs == "keyword" else {}


def loss(out: Any) -> Any:
    """Reduce the output to a number in which every element has its own weight."""
    weights = torch.arange(out.numel()).view(out.shape).float().sin()
    return (out * weights).sum() / 8 + out.square().mean()
