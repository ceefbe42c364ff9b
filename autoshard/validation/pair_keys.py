"""Canonical keys of measured rows: other names, MaxText's arguments, labels, and values that are not stated.

Sources name one option by many keys. Readers of rows see one name for each option. A key without influence on a price
is a label, which goes into the row's note. An unknown key whose name tells of dtypes, kernels or schedules stays among
the options, so that the row is refused.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from autoshard.validation.published_runs import IncompleteError


_NAMES: Mapping[str, str] = {
    "dp": "data data_parallel data_parallelism dp_degree dp_size replica replicas",
    "fsdp": "fsdp_degree fsdp_size fsdp_parallelism data_parallel_shard_degree dp_shard",
    "tp": "tensor tensor_parallel tensor_parallelism tp_degree tp_size tensor_model_parallel_size mdl",
    "ep": "expert expert_parallel expert_parallelism ep_degree ep_size expert_model_parallel_size",
    "cp": "context_parallel context_parallelism cp_degree cp_size context_parallel_size",
    "pp": "pipeline pipeline_parallel pipeline_parallelism pp_degree pp_size stages pipeline_model_parallel_size",
    "tp_transpose": "tensor_transpose",
    "dcn_dp": "dcn_data",
    "dcn_pp": "dcn_pipeline",
    "seq": "max_target_length sequence sequence_length seq_len seq_length context_length max_seq_len",
    "per_device_batch": "per_device_batch_size pdb batch_per_device local_batch sequences_a_device",
    "per_chip_batch": "per_chip_batch_size batch_per_chip sequences_a_chip",
    "global_batch": "batch global_batch_size batch_size global_batch_seqs sequences",
    "tokens_per_step": "tokens_a_step global_tokens batch_tokens tokens_per_batch",
    "tokens_per_chip": "tokens_a_chip tokens_per_step_per_chip",
    "tokens_per_device": "tokens_a_device",
    "gradient_accumulation": "gradient_accumulation_steps grad_accum grad_accumulation accumulation",
    "micro_batch": "micro_batch_size microbatch_size mbs",
    "microbatches": "micro_batches num_microbatches",
    "virtual_stages": "virtual_pipeline_model_parallel_size interleave chunks",
    "remat": "remat_policy recompute recomputation activation_checkpointing gradient_checkpointing ac",
    "xla_flags": "flags libtpu_init_args base_xla_flags base_flags",
    "layers": "num_layers num_decoder_layers base_num_decoder_layers n_layers num_hidden_layers",
    "emb": "emb_dim base_emb_dim width d_model hidden hidden_size model_dim",
    "mlp": "mlp_dim base_mlp_dim ffn ffn_dim intermediate_size d_ff",
    "heads": "num_heads num_query_heads base_num_query_heads query_heads num_attention_heads n_heads",
    "kv_heads": "num_kv_heads base_num_kv_heads num_key_value_heads n_kv_heads key_heads",
    "head_dim": "head_size",
    "vocab": "vocab_size vocabulary",
    "experts": "num_experts n_experts routed_experts",
    "top_k": "num_experts_per_tok experts_per_token active_experts",
    "moe_mlp": "base_moe_mlp_dim moe_mlp_dim expert_width moe_intermediate_size",
    "first_dense_layers": "first_num_dense_layers dense_layers",
    "kv_lora_rank": "kv_lora",
    "q_lora_rank": "q_lora",
    "qk_nope": "qk_nope_head_dim",
    "qk_rope": "qk_rope_head_dim",
    "v_head": "v_head_dim",
    "tied_head": "tied tie_embeddings logits_via_embedding tie_word_embeddings",
    "optimizer": "opt_type optimiser",
    "attention": "attention_kernel attn",
    "fused_attention_bwd": "sa_use_fused_bwd_kernel",
    "scan_layers": "scan scanned",
    "cp_method": "context_parallel_strategy context_parallel_method",
    "load_balanced": "context_parallel_load_balance",
    "dtype": "precision compute_dtype",
    "weight_dtype": "weights_dtype param_dtype params_dtype",
    "dvfs": "dvfs_p_state",
    "slices": "num_slices slice_count islands",
    "chips": "num_chips chip_count num_gpus gpus num_tpus",
    "devices": "num_devices device_count jax_devices",
    "zero1": "shard_optimizer_over_data",
}
"""Key by our name -> other names for it, separated by blanks."""
_CANONICAL = {other: name for name, others in _NAMES.items() for other in others.split()}
_ARGUMENTS = re.compile(
    r"(base_|extra_|maxtext_|trainer_)?(args|arguments|config|overrides|options|settings|parameters)"
)
"""Keys whose value is an object of further options, such as `base_args`."""
_PRICED = re.compile(
    r"dtype|quant|precision|kernel|schedul|remat|recomput|offload|tile|chunk|switch|ring|exchange|dispatch|shard|"
    r"parallel|attention|splash|moe|expert|rout|optim|fp\d|bf\d|f\d\d|int\d|float\d|overlap|compress|flag|prefetch|"
    r"block|accum|micro|stage|degree|zero|seq|batch|layer|width|dim|capacity|sparse|window|fus|lora|mesh|gather|"
    r"reduce|collective|dropout|topology|chip|slice"
)
"""Parts of names of options that change a price."""
_KNOWN_LABELS = re.compile(
    r"use_iota_embed|.*checkpoint\w*|dataset\w*|tokenizer\w*|.*note|.*_dir(ectory)?|.*_path|profil\w*|.*goodput\w*|.*vertex\w*|"
    r"steps|log_\w+|eval_\w+|.*metrics\w*|run_name|model_name|jax_\w+|allow_split_physical_axes|reuse_example_batch|"
    r"lm_head_vocab_parallel|compile_memory_gib|shardy|enable_jax_profiler|params?(_b)?|activated?_params"
)
"""Arguments of trainers that change no step, though a part of their name might."""
_OFF = ("", "none", "no", "off", "false", "default", "defaults", "auto", "null", "-1", "0")
_UNSTATED = re.compile(r"(not (said|stated|given|known|logged)|unknown|unstated|per row|n/?a\b|\?+$|tbd)", re.I)
"""Beginnings of texts that stand where a source has no value."""
_PLACES = ("device", "offload", "remat")
"""Values of MaxText's arguments that place a saved tensor."""
_AXES = {
    "data": "dp",
    "fsdp": "fsdp",
    "fsdp_transpose": "fsdp",
    "tensor": "tp",
    "tensor_sequence": "tp",
    "tensor_transpose": "tp_transpose",
    "expert": "ep",
    "context": "cp",
    "pipeline": "pp",
}
"""MaxText's mesh axes -> our degrees."""
_MESH_KEYS = frozenset({*_AXES.values(), "mesh", "fsdp_or_dp"})
"""Keys that state the mesh."""
_NUMBERS = frozenset({*_AXES.values(), "dvfs", "mlp", "emb", "layers", "heads", "seq", "global_batch", "experts"})
"""Keys whose values are numbers."""
_MESH = {"mdl": "tensor", "model": "tensor", "stage": "pipeline", "replica": "data", "dp": "data", "tp": "tensor"} | {
    "ep": "expert", "cp": "context", "pp": "pipeline",
}  # fmt: skip
"""Other names of mesh axes -> MaxText's."""
_FLAT = re.compile(r"(ici|dcn)_(\w+?)_parallelism")
BATCHES = (
    "per_device_batch",
    "per_chip_batch",
    "global_batch",
    "tokens_per_step",
    "tokens_per_chip",
    "tokens_per_device",
)
"""Keys that state the batch of a step, in the order in which they are used."""


def canonical(stated: Any) -> dict[str, Any]:
    """Return an object of options with our keys, with nested arguments laid flat, and without values that no source
    states.

    Anything but an object gives no options. Raises `IncompleteError` if two names of one key have different values.
    """
    options: dict[str, Any] = {}
    for key, value in _flat(stated) if isinstance(stated, Mapping) else ():
        name = re.sub(r"\W+", "_", key.strip().lower()).strip("_")
        name = _CANONICAL.get(name, name) if not _is_word(name, value) else name
        if value is None or (isinstance(value, str) and _UNSTATED.match(value.strip()) and name != "xla_flags"):
            continue
        if name in options and options[name] != value and name != "xla_flags":
            raise IncompleteError(f"{name} is stated twice, as {options[name]} and as {value}")
        options[name] = [*_listed(options[name]), *_listed(value)] if name in options else value
    return options


def _is_word(name: str, value: Any) -> bool:
    """Return True if a key that could be a degree or a size has a text without digits, as `data: synthetic`."""
    known = _CANONICAL.get(name)
    return known in _NUMBERS and isinstance(value, str) and not re.fullmatch(r"-?[\d.]+", value)


def _flat(stated: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield keys and values; those of nested arguments come first, and outer keys have priority."""
    for key, value in stated.items():
        if isinstance(value, Mapping) and _ARGUMENTS.fullmatch(str(key).lower()):
            own = {_CANONICAL.get(str(name).lower(), str(name).lower()) for name in stated}
            yield from ((k, v) for k, v in _flat(value) if _CANONICAL.get(str(k).lower(), str(k).lower()) not in own)
    for key, value in stated.items():
        if str(key).lower() == "mesh" and isinstance(value, Mapping):
            yield from _mesh_axes(value).items()
        elif not (isinstance(value, Mapping) and _ARGUMENTS.fullmatch(str(key).lower())):
            yield str(key), value


def _mesh_axes(mesh: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes of a mesh as MaxText's degrees; sizes of two axes with one meaning multiply."""
    degrees: dict[str, Any] = {}
    for axis, size in mesh.items():
        level, name = re.match(r"(dcn_|ici_)?(\w*)", str(axis).lower()).groups()  # type: ignore[union-attr]
        key = f"{level or 'ici_'}{_MESH.get(name, name)}_parallelism"
        whole = isinstance(size, int) and isinstance(degrees.get(key), int)
        degrees[key] = degrees[key] * size if whole else size
    return degrees


def _listed(flags: Any) -> list[str]:
    """Return compiler flags as a list of texts: of a list as it is, of a text its words that are flags."""
    return [str(each) for each in flags] if isinstance(flags, list) else re.findall(r"--\S+", str(flags))


def group_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that hold for all rows of a group: `fixed`, and arguments such as `base_args`.

    `fixed` has priority over arguments. Flags of `base_xla_flags` hold for all rows, and stay under that key.
    """
    base = {key: value for key, value in given.items() if _ARGUMENTS.fullmatch(key.lower())}
    return canonical(base) | canonical(given.get("fixed"))


def is_label(key: str, value: Any) -> bool:
    """Return True if an option that no reader knows is a label: its name tells of nothing that changes a price.

    So is an option that its value switches off.
    """
    if _KNOWN_LABELS.fullmatch(key) or not _PRICED.search(key):
        return True
    return value is False or (isinstance(value, str) and value.strip().lower() in _OFF)


def tensor_places(stated: Mapping[str, Any]) -> dict[str, str]:
    """Return the places of single tensors, such as `decoder_layer_input: offload`, by MaxText's names."""
    return {key: value for key, value in stated.items() if isinstance(value, str) and value in _PLACES}


def with_arguments(stated: Mapping[str, Any], devices: int, slices: int) -> dict[str, Any]:
    """Return options in which MaxText's arguments are translated into ours; ours have priority where both are stated.

    - `devices`: JAX devices of all slices.
    - `slices`: number of slices, over which the `dcn` degrees go.

    Raises `IncompleteError` for degrees that make another number of devices or slices.
    """
    options = dict(stated)
    options |= _degrees(stated, devices, slices)
    options |= {key: value for key, value in _experts(stated).items() if key not in stated}
    dtype = _dtype(stated)
    if dtype:
        options["dtype"] = dtype
    if "bfloat16" in str(stated.get("mu_dtype")) or stated.get("mu_dtype") == "bf16":
        options["optimizer"] = f"{stated.get('optimizer', 'adamw')}, mu bf16"
    if "bf" in str(stated.get("grad_dtype")):
        options["optimizer"] = f"{options.get('optimizer', 'adamw')}, grad bf16"
    if stated.get("use_tokamax_splash") is True:
        options["attention"] = "tokamax splash"
    if isinstance(stated.get("remat"), bool):
        options["remat"] = "full" if stated["remat"] else "none"
    if str(options.get("cp_method")).replace("_", "-") == "all-gather":
        options["cp_method"] = "all-gather"
    return options


def _degrees(stated: Mapping[str, Any], devices: int, slices: int) -> dict[str, Any]:
    """Return the degrees that MaxText's `ici_*_parallelism` and `dcn_*_parallelism` state.

    A degree of -1 takes the devices, or the slices, that the others leave. MaxText's own defaults are -1 for
    `ici_fsdp` and `dcn_data`.
    """
    found = {match.groups(): stated[key] for key in stated if (match := _FLAT.fullmatch(key))}
    if not found:
        return {}
    degrees: dict[str, int] = {}
    spans: dict[str, int] = {}
    for level, total in (("ici", devices // slices), ("dcn", slices)):
        own = {axis: value for (where, axis), value in found.items() if where == level}
        own.setdefault("fsdp" if level == "ici" else "data", -1)
        for axis, value in own.items():
            if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value > 0):
                raise IncompleteError(f"{level}_{axis}_parallelism is {value!r}, not a whole number above 0 or -1")
            if axis not in _AXES and value != 1:
                raise IncompleteError(f"{level}_{axis}_parallelism={value} is not rebuilt")
        rest = math.prod(value for value in own.values() if value > 0)
        free = [axis for axis, value in own.items() if value == -1]
        # A degree that is not stated takes the rest only if no stated one does.
        free = [axis for axis in free if (level, axis) in found] or free
        if len(free) > 1 or total % rest or (rest != total and not free):
            raise IncompleteError(f"the {level} degrees make {rest}, but there are {total}")
        for axis, value in own.items():
            number = total // rest if axis in free else max(value, 1)
            name = _AXES.get(axis, axis)
            degrees[name] = degrees.get(name, 1) * number
            if level == "dcn" and number > 1:
                spans[f"dcn_{name}"] = spans.get(f"dcn_{name}", 1) * number
    both = itertools.chain(degrees.items(), spans.items())
    return {name: number for name, number in both if number > 1 and name not in stated}


def _experts(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return routing and tiles of experts from MaxText's arguments; a stated text of `moe` has priority."""
    options: dict[str, Any] = {}
    capacity = stated.get("capacity_factor")
    if isinstance(capacity, int | float) and not isinstance(capacity, bool) and capacity > 0:
        options["moe"] = f"dropping cf {float(capacity)}"
    elif stated.get("use_tokamax_gmm") is True:
        options["moe"] = "tokamax gmm"
    elif stated.get("megablox") is True or stated.get("sparse_matmul") is True:
        options["moe"] = "megablox dropless"
    tiles = [stated.get(f"tile_{name}") for name in ("batch_seq", "embed_dim", "mlp_dim")]
    if all(isinstance(size, int) for size in tiles):
        options["moe_tiles"] = "/".join(map(str, tiles))
    return options


def _dtype(stated: Mapping[str, Any]) -> str:
    """Return one text for the dtypes of compute and weights and the quantisation; empty if only `dtype` states them."""
    if not {"weight_dtype", "quantization", "quantisation"} & stated.keys():
        return ""
    short = {"float32": "f32", "bfloat16": "bf16"}
    compute, weights = (str(stated.get(key, "")) for key in ("dtype", "weight_dtype"))
    compute, weights = short.get(compute, compute or "bf16"), short.get(weights, weights or "f32")
    quantised = str(stated.get("quantization") or stated.get("quantisation") or "")
    texts = [compute] if "compute" in compute else [f"{compute} compute", f"{weights} weights"]
    return ", ".join([*texts, *([f"quantised {quantised}"] if quantised.lower() not in _OFF else [])])


def gaps(assume: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in `assume` that a row does not state.

    A row that states any degree states all of them, and one that states a batch by any key has one.
    """
    kinds = (_MESH_KEYS, frozenset(BATCHES))
    taken = {key for kind in kinds if kind & stated.keys() for key in kind}
    return {key: value for key, value in assume.items() if key not in stated and key not in taken}


TRANSLATED = re.compile(
    r"(ici|dcn)_\w+_parallelism|sa_block_\w+|capacity_factor|megablox|sparse_matmul|use_tokamax_(gmm|splash)|"
    r"tile_(batch_seq|embed_dim|mlp_dim)|weight_dtype|mu_dtype|grad_dtype|quanti[sz]ation|use_iota_embed"
)
"""Arguments of MaxText that `with_arguments` and the readers of attention's blocks translate."""
