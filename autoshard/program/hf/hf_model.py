"""Construction of the module of any architecture in the installed transformers from its configuration."""

import importlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

from autoshard.errors import UserError, reason_of
from autoshard.program.hf.hf_attention import choose_attention, register_attention
from autoshard.program.moe.hf_experts import register_experts
from autoshard.program.torch_ops import torch_imports
from autoshard.program.torch_ops.torch_imports import import_model_code


_NOT_FIELDS = {"architectures", "model_type", "torch_dtype", "dtype", "transformers_version"}
"""Keys of a saved configuration that its class does not accept, or that are decided here."""

_HEADS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "IMAGE_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "DEPTH_ESTIMATION",
    "VISUAL_QUESTION_ANSWERING",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "TIME_SERIES_PREDICTION",
    "MASKED_IMAGE_MODELING",
    "MASK_GENERATION",
    "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING",
    "IMAGE_TO_IMAGE",
    "PRETRAINING",
    "",
)
"""Tasks of transformers' automatic classes, the likeliest to be trained first; "" is a model without a head."""


def build_model(
    name: str, fields: dict[str, Any], dtype: str, change: Callable[[Any], None] = lambda config: None
) -> Any:
    """Return the torch module of a configuration, with weights on the meta device, in evaluation mode.

    - `name`: name of the model in errors.
    - `fields`: fields of the configuration; the first of `architectures` is the class to build.
    - `dtype`: torch's name of the dtype of weights; saved statistics are float32.
    - `change`: changes the configuration in place.

    Raises `UserError` for a model type or an architecture that transformers lacks, and for fields that it cannot use.
    """
    import torch

    _quiet()
    kind = str(fields["model_type"])
    config_class = _config_class(name, kind)
    model_class = _model_class(name, kind, config_class, (fields.get("architectures") or [None])[0])
    register_attention()
    register_experts()
    before = torch.get_default_dtype()
    try:
        config = _part_for(model_class, config_class(**config_fields(config_class, fields)))
        change(config)
        config._attn_implementation = "eager"
        config._experts_implementation = "autoshard"
        torch.set_default_dtype(getattr(torch, dtype))
        model = torch_imports.build(lambda: model_class(config))
        choose_attention(model)
        _widen_statistics(model)
    except UserError:
        raise
    except Exception as error:  # a hand-written configuration may make the model's code raise anything
        raise UserError(f"`{name}` cannot be built: {type(error).__name__}: {reason_of(error, 3)}.") from error
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def config_fields(config_class: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved configuration that its configuration class accepts, special floats decoded.

    Private keys and `_NOT_FIELDS` are left out.
    """
    known = {key: value for key, value in fields.items() if not key.startswith("_") and key not in _NOT_FIELDS}
    decode = getattr(
        config_class, "_decode_special_floats", None
    )  # {"__float__": "Infinity"}, as transformers saves it
    return known if decode is None else decode(known)


def _config_class(name: str, kind: str) -> Any:
    """Return the configuration class of a model type, which may be defined in another model's code.

    Raises `UserError`, with `name` as the model's name, if transformers lacks the model type or the class.
    """
    auto = import_model_code("transformers.models.auto.configuration_auto")
    class_name = auto.CONFIG_MAPPING_NAMES.get(kind) or auto.CONFIG_MAPPING_NAMES.get(kind.replace("-", "_"))
    if class_name is None:
        raise UserError(
            f"`{name}`: the installed transformers has no model type `{kind}`; "
            f"check `model_type` in the configuration{_near(kind, auto.CONFIG_MAPPING_NAMES)}."
        )
    folder = f"transformers.models.{auto.model_type_to_module_name(kind)}"
    for module in _modules(folder, "configuration_"):
        if hasattr(module, class_name):
            return getattr(module, class_name)
    if (shared := _shared(class_name)) is not None:
        return shared
    raise UserError(f"`{name}`: transformers' code of `{kind}` has no `{class_name}`; install a release that has it.")


def _model_class(name: str, kind: str, config_class: Any, architecture: str | None) -> Any:
    """Return the class called `architecture`, or else the likeliest class with a head for the configuration.

    - `name`: name of the model in errors.
    - `kind`: model type.
    - `config_class`: class of the configuration.
    - `architecture`: name of the class; None to choose in the order of `_HEADS`.

    A class for the whole configuration precedes one for its text part. Raises `UserError` if there is none.
    """
    folder = config_class.__module__.rpartition(".")[0]
    auto = import_model_code("transformers.models.auto.modeling_auto")
    offered = [getattr(auto, f"MODEL_{'FOR_' + head + '_' if head else ''}MAPPING_NAMES", {}) for head in _HEADS]
    named = [text for names in offered if (text := names.get(kind))]
    usual = [text if isinstance(text, str) else text[0] for text in named]
    texts = [architecture] if architecture is not None else usual
    architecture = texts[0] if texts else None
    candidates = [each for text in texts if (each := _offered(folder, text, usual)) is not None]
    matching = [each for each in candidates if _takes(each, config_class)]
    if matching or candidates:
        return (matching or candidates)[0]
    offers = sorted(
        {
            each
            for module in _modules(folder, "modeling_")
            for each in getattr(module, "__all__", ())
            if "PreTrained" not in each
        }
    )
    problem = f"transformers offers no `{architecture}` for" if architecture else "transformers has no class for"
    more = f"; `architectures` may name {', '.join(offers)}" if offers else ""
    raise UserError(f"`{name}`: {problem} model type `{kind}`{more}.")


def has_head(architecture: str) -> bool:
    """Return True if a class is for a task: its name ends with no `Model`, or an automatic class of a task has it.

    A name with `LMHead` is for a task too.
    """
    auto = import_model_code("transformers.models.auto.modeling_auto")
    if not architecture.endswith("Model") or "LMHead" in architecture:
        return True
    tasks = [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}) for head in _HEADS if head]
    return any(architecture in names.values() for names in tasks)


def _offered(folder: str, text: str | None, shared: Collection[str]) -> Any:
    """Return the model class called `text` from the model's own code in `folder`; None if there is none.

    A name among `shared` may also come from the code of another model. `text` None gives None.
    """
    for module in _modules(folder, "modeling_") if text else ():
        candidate = getattr(module, str(text), None)
        if _is_model(candidate):
            return candidate
    return _shared(text) if text in shared else None


def _shared(text: Any) -> Any:
    """Return the class that transformers exports under this name, from any model's code; None if there is none."""
    import transformers

    exported = getattr(transformers, str(text), None)
    return exported if isinstance(exported, type) else None


def _takes(model_class: Any, config_class: Any) -> bool:
    """Return True if a model class accepts configurations of this class, or names no class of configurations."""
    wanted = getattr(model_class, "config_class", None)
    return wanted is None or issubclass(config_class, wanted)


def _part_for(model_class: Any, config: Any) -> Any:
    """Return the configuration, or the first nested one that a model class accepts if it does not accept the whole.

    The whole configuration is returned if no nested one fits either.
    """
    if _takes(model_class, type(config)):
        return config
    parts = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    return next((part for part in parts if part is not None and _takes(model_class, type(part))), config)


def runnable_part(model: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the module, or its first child model with a forward pass if the module itself has none, and notes.

    The note names the part and the other parts. A module without such a part is returned as it is.
    """
    import torch

    def acts(module: Any) -> bool:
        """Return True if the module's class defines a forward pass."""
        return type(module).forward is not torch.nn.Module.forward

    if acts(model):
        return model, ()
    parts = {type(child).__name__: child for child in model.children() if _is_model(type(child)) and acts(child)}
    if not parts:
        return model, ()
    first, *others = parts
    more = f" `architectures` may name another: {', '.join(others)}." if others else ""
    note = f"`{type(model).__name__}` computes nothing as a whole; planned is the first of its parts, `{first}`.{more}"
    return parts[first], (note,)


def _is_model(offered: Any) -> bool:
    """Return True for a torch module class of transformers, one with `from_pretrained`, and False for other objects."""
    import torch

    return isinstance(offered, type) and issubclass(offered, torch.nn.Module) and hasattr(offered, "from_pretrained")


def _modules(folder: str, prefix: str) -> Iterator[Any]:
    """Yield the modules of a model's folder whose names begin with `prefix`, the one named like the folder first."""
    import pkgutil

    package = importlib.import_module(folder)
    names = [each.name for each in pkgutil.iter_modules(package.__path__) if each.name.startswith(prefix)]
    usual = prefix + folder.rpartition(".")[2]
    for each in sorted(names, key=lambda text: (text != usual, text)):
        yield import_model_code(f"{folder}.{each}")


def _near(kind: str, known: Any) -> str:
    """Return the end of a sentence with up to three similar names of `known`; empty if there is none."""
    import difflib

    near = difflib.get_close_matches(kind, list(known), 3, 0.6)
    return f", or use {' or '.join(f'`{each}`' for each in near)}" if near else ""


def _widen_statistics(model: Any) -> None:
    """Convert a model's persistent floating buffers (running means, routing biases) to float32, in place."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and key not in module._non_persistent_buffers_set:
                module._buffers[key] = buffer.float()


def _quiet() -> None:
    """Set the logger of transformers to errors only.

    Its advice on kernels and weights does not apply to a model without weights.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
