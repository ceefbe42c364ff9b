"""Names of parameters that stack repeated layers: `model.layers.*.w`, and `[0:2].w` or `[1::2].w` for some of them."""

import re


_NUMBER = re.compile(r"(?<![^.\[\]/_])\d+(?![^.\[\]/_])")
_SLICE = re.compile(r"\[(\d*):(\d*)(?::(\d*))?\]")


def is_stacked(name: str) -> bool:
    """Whether a name is that of a stack of layers, whose first dim counts the layers."""
    return any(part == "*" or _SLICE.fullmatch(part) for part in name.split("."))


def layer_pattern(name: str, layers: int) -> str:
    """A regular expression for the names of the single layers' parameters; `layers` is the size of the stack."""
    parts = []
    for part in name.split("."):
        found = _SLICE.fullmatch(part)
        if found:
            start, step = int(found[1] or 0), int(found[3] or 1)
            parts.append(f"(?:{'|'.join(str(start + step * k) for k in range(layers))})")
        else:
            parts.append(r"\d+" if part == "*" else re.escape(part))
    return r"\.".join(parts) + "$"


def pattern(name: str) -> str:
    """`layers.3.mlp.weight` -> `layers.*.mlp.weight`: what the repeats of one block have in common."""
    return _NUMBER.sub("*", name)


def stack_names(name: str, layers: int) -> list[str]:
    """Names with no other wildcard than `*`: that of a stack of some of the layers becomes one name for each."""
    names = [""]
    for part in name.split("."):
        found = _SLICE.fullmatch(part)
        start, step = (int(found[1] or 0), int(found[3] or 1)) if found else (0, 1)
        parts = [str(start + step * k) for k in range(layers)] if found else [part]
        names = [f"{ahead}.{each}" if ahead else each for ahead in names for each in parts]
    return names
