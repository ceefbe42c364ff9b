"""Code in exports to DTensor that runs functions whole where DTensor cannot split them, and places gradients."""

WHOLE_IMPORTS = """import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
"""
"""Imports of the code below, besides `DTensor` and `Replicate`."""

WHOLE_SENTENCE = (
    "functions that DTensor cannot split, einsum among them; every device runs them whole, where "
    "`plan.distribute(model, mesh)` splits most of them."
)
"""The line about them in the head of an export."""

WHOLE_CALLS = '''

class WholeCalls(TorchFunctionMode):
    """Functions that DTensor cannot split run whole on every device, while a module of the model runs."""

    # DTensor returns wrong gradients of an einsum whose operands two mesh axes split.
    ALWAYS = (torch.einsum, torch.functional.einsum)
    # Gradients of these write into zeros, which DTensor does not split.
    SELECTIONS = ("topk", "sort", "max", "min", "median", "kthvalue", "mode", "cummax", "cummin")
    # A gradient that is split unlike the result of a view may have no view back.
    VIEWS = ("view", "reshape", "flatten", "unflatten")
    # DTensor would carry parts of sums through the ops after these, and sum each of their results.
    SUMS = ("linear", "matmul", "bmm", "embedding")

    def __init__(self, model):
        super().__init__()
        self.depth = 0
        for module in model.modules():  # a checkpoint calls a module within the model again
            module.register_forward_pre_hook(self.enter)
            module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module, args):
        if not self.depth:
            self.__enter__()
        self.depth += 1

    def leave(self, module, args, output):
        self.depth -= 1
        if not self.depth:
            self.__exit__(None, None, None)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        split = [value for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor)]
        if not split:
            return function(*args, **kwargs)
        mesh, whole = split[0].device_mesh, [Replicate()] * split[0].device_mesh.ndim
        name, target = function.__name__, None
        if name == "layer_norm":  # DTensor has no gradient of a split weight
            args, kwargs = tree_map_only(
                DTensor, lambda v: v.redistribute(placements=whole) if v.ndim == 1 else v, (args, kwargs)
            )
        if name == "__setitem__" or name.endswith("_") and not name.endswith("__"):
            target = args[0]
        if name == "cat":  # a cache joins values to a plain tensor without elements, which DTensor would split
            args = ([value for value in args[0] if value.shape != (0,)], *args[1:])
        if name not in self.SELECTIONS and (mesh.ndim == 1 or function not in self.ALWAYS):
            try:
                result = function(*args, **kwargs)
                parts = name in self.SUMS and any(place.is_partial() for place in result.placements)
                if parts:
                    result = result.redistribute(placements=summed(result.placements))
                # Back through that sum, DTensor takes parts of a gradient for the whole of it.
                if (parts or name in self.VIEWS) and result.requires_grad:
                    result.register_hook(placed(result.placements))
                return result
            except (AssertionError, NotImplementedError, RuntimeError):
                if kwargs.get("inplace") or "out" in kwargs:
                    raise  # the write would be lost
        if name == "scaled_dot_product_attention" and len(args) == 3 and kwargs.get("attn_mask") is None:
            whole = parts_of_attention(args[0], args[1])  # DTensor splits it on GPUs only
        args, kwargs = tree_map_only(
            DTensor, lambda v: v.redistribute(placements=whole).to_local(grad_placements=whole), (args, kwargs)
        )
        if isinstance(target, DTensor):
            args = (args[0].clone(), *args[1:])
        result = function(*args, **kwargs)
        if isinstance(target, DTensor):
            return target.copy_(DTensor.from_local(args[0], mesh, whole, run_check=False))
        return tree_map_only(torch.Tensor, lambda v: DTensor.from_local(v, mesh, whole, run_check=False), result)


def summed(placements):
    """The placements once parts of sums are added up."""
    return [Replicate() if place.is_partial() else place for place in placements]


def parts_of_attention(query, key):
    """The placements of queries by sequences and heads, where these divide the heads of keys as well."""
    mesh, places, parts = query.device_mesh, [], [1, 1]
    for axis, place in enumerate(query.placements):
        dim = place.dim if place.is_shard() and place.dim < 2 else None
        total = parts[dim] * mesh.size(axis) if dim is not None else 1
        if dim is None or query.shape[dim] % total or key.shape[dim] % total:
            place = Replicate()
        else:
            parts[dim] = total
        places.append(place)
    return places


def placed(placements):
    """A hook that splits a gradient so, with its parts summed."""
    return lambda grad: grad.redistribute(placements=summed(placements))


def place_gradients(model):
    """Sum the parts of every gradient, and split it as its parameter: norms of gradients then count them once."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_hook(placed(parameter.placements))

'''
"""Code of a class and of a function; the class starts to work when it is made of a model."""
