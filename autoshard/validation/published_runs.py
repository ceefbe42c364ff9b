"""Reader of the published runs of others, with the defaults of their frameworks."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from autoshard.base.files import read_json
from autoshard.cost import Chip, Topology, chip_names, load_chip, read_flags, slice_names
from autoshard.errors import UserError
from autoshard.program import SAVABLE, SAVED, GroupedKernels, GroupedTiles, KernelBlocks, Pipeline
from autoshard.serving import Decoder


def stack_axis(framework: str) -> int:
    """Return the default dim of stacked parameters that counts layers: 1 in MaxText (`param_scan_axis`), else 0."""
    return int("maxtext" in framework.lower())


def stream_on_width(framework: str) -> bool:
    """Return True if a framework's tensor parallelism splits the residual stream on its width.

    MaxText's axis `tensor` does, according to `activation_embed` in its logical axis rules. `tensor_sequence` is
    another axis of MaxText. torchprime's tensor parallelism does too, according to the sharding of layers' outputs in
    its configurations. Other frameworks are assumed to split the sequence.
    """
    return bool(re.search(r"maxtext|torchprime|torch_xla|tpu-recipes", framework, re.I))


FILE = pathlib.Path(__file__).with_name("published.json")
"""Published runs that are shipped with the project; each names its source."""

_KEYS = {"id", "model", "metric", "value", "source"}
"""Keys that a row must have."""
_NUMBERS = ("chips_per_slice", "slices", "seq", "per_chip_batch", "global_batch_seqs", "value", "step_time_s")
"""Keys of a row whose values are numbers above 0."""
_DIMS = {"L": "layers", "D": "width", "F": "mlp_width", "N": "heads", "K": "kv_heads", "H": "head_size"}
"""Dims of a model as rows name them -> arguments of `Decoder`."""
_AXES = {"DP": "copies", "FSDP": "spread", "FSDP_TRANSPOSE": "spread", "TP": "tensor"}
"""Degrees in the text of a sharding -> fields of `Run`."""
_RATE = re.compile(r"TFLOP/s/(chip|device)|(?:MFU|HW utilisation) %")
"""Metrics from which the seconds of a step can be computed."""
LOCAL_WINDOWS = {"gemma2": (4096, 2), "gemma3": (1024, 6)}
"""Families with local attention -> tokens that a local layer sees, and layers in a group that ends with a global layer.

Sources: Gemma 2, 2024; Gemma 3, 2025.
"""
FUSED_QKV = "gpt3"
"""Family of which one matmul computes queries, keys and values.

Source: AI-Hypercomputer/maxtext, MaxText/configs/models/gpt3-175b.yml (`fused_qkv`).
"""
_FLASH = re.compile(r"maxtext|tpu-recipes", re.I)
"""Sources that state `attention=flash` (MaxText's splash kernel); others materialise all scores.

A row's own `attention` has priority.
"""
_ATTENTIONS = ("flash", "dot_product")


class IncompleteError(Exception):
    """Error for a row that cannot be rebuilt, with the reason."""


def source_group(source: str) -> str:
    """Return `owner/name: folder` of a source such as `owner/name@commit:folder/.../README.md`.

    Rows of one published table have equal results. The folder is that of a chip's generation, else the file's own. A
    source of another form is returned unchanged.
    """
    repository, _, path = source.partition(":")
    if not path or "/" not in repository:
        return source
    generations = {alias for name in chip_names() for alias in (name, *load_chip(name).aliases)}
    parts = re.split(r" \+ | ", path)[0].split("/")
    last = next((k for k, part in enumerate(parts) if part in generations), len(parts) - 2)
    return f"{repository.partition('@')[0]}: {'/'.join(parts[: last + 1])}"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One complete training run: model, machine, sharding and options."""

    decoder: Decoder
    topology: Topology
    copies: int
    """Devices along data parallelism, each with a copy of the parameters."""
    spread: int
    """Devices over which parameters are spread (FSDP)."""
    tensor: int
    """Devices over which parameters are split by tensor parallelism."""
    batch: int
    """Sequences of a step on all devices, all microbatches included."""
    seq: int
    """Number of tokens of a sequence."""
    remat: str
    """Policy of recomputation: a key of `SAVED`, or `none`."""
    saves: tuple[str, ...] | None
    """Values that a layer saves for the backward pass; None for those that `remat` implies."""
    flash: bool
    """True for a fused kernel of attention, False for materialised scores."""
    blocks: KernelBlocks
    """Block sizes of that attention kernel."""
    flags: tuple[str, ...]
    """Compiler flags of the run, as far as its author states them."""
    step_s: float
    """Measured seconds of a step; 0 if they are stored elsewhere."""
    assumed: tuple[str, ...]
    """Choices that the source leaves open, as text."""
    optimizer: str = "adamw"
    """Name of the optimizer: `adamw` or `sgd`."""
    compute: str = "bfloat16"
    """Dtype in which layers are computed."""
    weights: str = "float32"
    """Dtype in which parameters are stored."""
    state: str | tuple[str, str] = "float32"
    """Dtype of the optimizer's moments, or the dtypes of first and second moments."""
    gradients: str | None = None
    """Dtype in which the optimizer receives gradients; None for the dtype in which they are computed."""
    accumulation: int = 1
    """Number of microbatches that are computed one after the other."""
    offloads: tuple[str, ...] = ()
    """Values of a layer that are saved in the host's memory for the backward pass."""
    capacity: float = 1.0
    """Slots of an expert over the mean number of its tokens.

    At 1 the matmuls have the size of balanced dropless routing.
    """
    tiles: GroupedTiles | None = None
    """Tiles of the kernels of dropless experts; None for experts with slots."""
    head_on_width: bool = False
    """True if FSDP splits the head on its width, which gathers its weights; False if on its vocabulary."""

    experts: int = 1
    """Devices over which experts are split (expert parallelism); all other tensors treat them as `spread`."""
    context: int = 1
    """Devices over which sequences are split (context parallelism); parameters are spread over them too."""
    exchange: str = "auto"
    """Exchange of queries, keys and values over `context`, one of `EXCHANGES`."""
    balanced: bool = False
    """True if tokens are ordered so that all parts of a sequence attend to equally many tokens."""
    stack_axis: int = 0
    """Dim of stacked parameters that counts layers (MaxText's `param_scan_axis`)."""
    stream_on_width: bool = False
    """True if tensor parallelism splits the residual stream on its width, False if on its sequence."""
    scanned: bool = True
    """True if layers are a loop over stacked parameters, False if they are unrolled."""

    spreads_state: bool = False
    """True if the optimizer state is spread over the devices with copies of the parameters (ZeRO-1)."""
    sums_late: bool = False
    """True if whole gradients are summed once, after the backward passes of all microbatches."""
    keeps_gathered: bool = False
    """True if weights are gathered once a step, and stored whole in the compute dtype for the backward pass."""
    pipeline: Pipeline | None = None
    """Pipeline stages on devices of their own; each stage shards its layers by the other degrees."""
    quantize: str | None = None
    """Form of 8 bits in which layers multiply with weights; None for the dtype of compute."""
    network: tuple[tuple[str, int], ...] = ()
    """Number of slices that a mesh axis spans; empty if the first axes span them."""

    @property
    def kernels(self) -> GroupedKernels | None:
        """Kernels of dropless experts with the devices that they run on; None without such kernels."""
        if self.tiles is None or self.decoder.experts == 1:
            return None
        chip = self.topology.chip
        cores = max(1, chip.cores_per_chip // chip.devices_per_chip)
        return GroupedKernels(self.tiles, self.copies * self.spread * self.context, self.experts, cores)

    def flops(self, causal: bool) -> float:
        """Return the model FLOPs of a step: 6 for each matmul parameter and token, and attention.

        With `causal`, attention counts half.
        """
        return self.decoder.train_flops(self.batch * self.seq, self.seq, causal)

    @property
    def peak_s(self) -> float:
        """Seconds of a step at the chips' bf16 peak; divided by the seconds of a run they are its MFU."""
        return self.flops(causal=True) / (self.topology.peak_flops("bf16") * self.topology.num_devices)


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulRun:
    """One measured matmul [n, n] x [n, n] on one device."""

    size: int
    topology: Topology
    """Smallest slice of the chip; only the rates of one device matter."""
    step_s: float
    """Measured seconds of the matmul."""


def is_published(path: str | pathlib.Path) -> bool:
    """Return True if a file contains published runs, False if it contains worked questions.

    The first row of either form decides. Raises: UserError for a file that cannot be read, or without such a row.
    """
    for row in _rows(pathlib.Path(path)):
        if isinstance(row, dict) and "metric" in row:
            return True
        if isinstance(row, dict) and "setting" in row:
            return False
    raise UserError(
        f"data file {path}: none of its rows is a published run (keys {', '.join(sorted(_KEYS))} ...) "
        "or a worked question (keys id, setting, answer ...)"
    )


def read_rows(path: str | pathlib.Path | None = None, bad: list[str] | None = None) -> list[dict[str, Any]]:
    """Read the rows of the published runs in a file (default: the shipped file), checked but not parsed.

    Rows of another form are left out if there is a list `bad`, to which their errors are added. Raises: UserError for a
    file that cannot be read, and without `bad` for a row of another form.
    """
    file = FILE if path is None else pathlib.Path(path)
    rows = []
    for number, row in enumerate(_rows(file)):
        try:
            _check_row(row, f"{file}, row {number}")
        except UserError as error:
            if bad is None:
                raise
            bad.append(str(error))
        else:
            rows.append(row)
    return rows


def _check_row(row: Any, origin: str) -> None:
    """Raise `UserError`, naming `origin`, for wrong keys or values of a row or of its assumptions (`assume`)."""
    if not isinstance(row, dict) or not row.keys() >= _KEYS:
        missing = sorted(_KEYS - row.keys()) if isinstance(row, dict) else sorted(_KEYS)
        raise UserError(f"{origin} of the published runs misses {', '.join(missing)}")
    given = row.get("assume")
    for part in (row, given) if isinstance(given, dict) else (row,):
        _check_values(part, f"{origin} ({row['id']})")


def _check_values(row: Mapping[str, Any], origin: str) -> None:
    """Raise `UserError` for a value of the wrong type; null is allowed for a value that is not stated.

    Keys that a row lacks are not checked.
    """
    for key in ("id", "model", "metric", "source"):
        if key in row and not isinstance(row[key], str):
            raise UserError(f"{origin}: {key} is {row[key]!r}, expected a text")
    for key in _NUMBERS:
        value = row.get(key)
        if value is not None and not (_is_number(value) and value > 0):
            raise UserError(f"{origin}: {key} is {value!r}, expected a number above 0, or null if it is not stated")
    saves = row.get("saves")
    if saves is not None and not (isinstance(saves, list) and all(name in SAVABLE for name in saves)):
        raise UserError(f"{origin}: saves is {saves!r}, expected a list of {', '.join(SAVABLE)}, or null")
    _check_blocks(row.get("attention_blocks"), origin)
    try:
        read_flags(row.get("xla_flags"))
    except (TypeError, UserError) as error:
        raise UserError(f"{origin}: xla_flags is {row['xla_flags']!r}: {error}") from None
    dims = row.get("dims")
    if dims is None:
        return
    if not isinstance(dims, dict):
        raise UserError(f'{origin}: dims is {dims!r}, expected an object such as {{"L": 32, "D": 4096, ...}}, or null')
    for key in (*_DIMS, "V"):
        if key in dims and not (_is_number(dims[key]) and dims[key] == int(dims[key]) > 0):
            raise UserError(f"{origin}: dims.{key} is {dims[key]!r}, expected a whole number above 0")
    for key in ("gated", "tied"):
        if not isinstance(dims.get(key, True), bool):
            raise UserError(f"{origin}: dims.{key} is {dims[key]!r}, expected true or false")


def _check_blocks(blocks: Any, origin: str) -> None:
    """Raise `UserError` for `attention_blocks` that are no arguments of `KernelBlocks`; None is valid."""
    known = {field.name: field.type for field in dataclasses.fields(KernelBlocks)}
    given = {} if blocks is None else blocks
    good = isinstance(given, dict) and given.keys() <= known.keys()
    for key, value in given.items() if good else ():
        pair = isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)
        good = good and (isinstance(value, bool) if key == "fused" else pair)
    if not good:
        raise UserError(
            f"{origin}: attention_blocks is {blocks!r}, expected an object such as "
            '{"forward": [512, 512], "keys": [512, 512], "queries": [512, 512], "fused": false}'
        )


def _pair(value: Any) -> Any:
    """Return a list as a tuple, and any other value unchanged."""
    return tuple(value) if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    """Return True for an int or a float, False for a boolean and anything else."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rows(file: pathlib.Path) -> list[Any]:
    """Read the list of rows of a file. Raises: UserError for a file without one."""
    try:
        document = read_json(file)
    except OSError as error:
        raise UserError(f"data file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"data file {file} is not JSON: {error}") from error
    rows = document.get("rows") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise UserError(f"data file {file} holds no list of rows")
    return rows


def parse_run(row: Mapping[str, Any]) -> Run | MatmulRun:
    """Parse a row that was checked: a training run, or a matmul if its model is `matmul N^3 bf16`.

    Values in `assume` have priority over the row's, and its reason (`why`) is added to the assumptions. Raises
    `IncompleteError` with the missing values, and for values that cannot be rebuilt.
    """
    assumed: list[str] = []
    if isinstance(row.get("assume"), dict):
        row = {**row, **row["assume"]}
        assumed.append(str(row.get("why", "")))
    size = re.fullmatch(r"matmul (\d+)\^3 bf16", str(row["model"]))
    chip = _chip(row)
    if size is not None:
        if row["metric"] != "TFLOP/s/device" or not row["value"]:
            raise IncompleteError("no rate of one device")
        n = int(size[1])
        one = Topology.make(chip, chip.small_shapes[0])
        return MatmulRun(n, one, 2.0 * n**3 / (row["value"] * 1e12))
    dims = row.get("dims")
    if not isinstance(dims, dict) or not dims.keys() >= {*_DIMS, "V"}:
        raise IncompleteError("the model's dims are not stated")
    other = dims.keys() - {*_DIMS, "V", "gated", "tied"}
    if other:
        raise IncompleteError(f"dims of another family ({', '.join(sorted(other))})")
    missing = [key for key in ("seq", "sharding", "remat", "chips_per_slice") if not row.get(key)]
    missing += [] if row.get("per_chip_batch") or row.get("global_batch_seqs") else ["batch"]
    if missing:
        raise IncompleteError(f"not stated: {', '.join(missing)}")
    family = next((name for name in LOCAL_WINDOWS if str(row["model"]).startswith(name)), None)
    window, every = LOCAL_WINDOWS[family] if family else (None, 1)
    if dims["L"] % every:
        raise IncompleteError(f"{dims['L']} layers are not whole groups of {every}")
    decoder = Decoder(
        **{name: dims[key] for key, name in _DIMS.items()},
        vocabulary=dims["V"],
        gated=dims.get("gated", True),
        tied=dims.get("tied", str(row["model"]).startswith("gemma")),
        window=window,
        global_every=every,
        fused_qkv=str(row["model"]).startswith(FUSED_QKV),
    )
    topology = _topology(row, chip, assumed)
    copies, spread, tensor = _sharding(str(row["sharding"]), topology)
    remat = str(row["remat"]).removesuffix("?")
    if remat not in SAVED and remat != "none":
        raise IncompleteError(f"remat {remat!r} is not known")
    attention = row.get("attention") or ("flash" if _FLASH.search(str(row["source"])) else "dot_product")
    if attention not in _ATTENTIONS:
        raise IncompleteError(f"attention {attention!r} is not known ({', '.join(_ATTENTIONS)} are)")
    flash = attention == "flash"
    saves = None if row.get("saves") is None else tuple(row["saves"])
    blocks = KernelBlocks(**{key: _pair(value) for key, value in (row.get("attention_blocks") or {}).items()})
    chips = topology.num_chips
    batch = row.get("global_batch_seqs") or row["per_chip_batch"] * chips
    batch, step = _step(row, decoder, chip, chips, int(batch), assumed)
    return Run(
        decoder, topology, copies, spread, tensor, batch, int(row["seq"]), remat, saves, flash, blocks,
        read_flags(row.get("xla_flags")), step, tuple(assumed), stack_axis=stack_axis(str(row["source"])),
        stream_on_width=stream_on_width(str(row["source"])),
    )  # fmt: skip


def _chip(row: Mapping[str, Any]) -> Chip:
    """Return the chip that a row names by the first word of `tpu` or `gpu`.

    Raises `IncompleteError` without a name and for an unknown chip.
    """
    name = str(row.get("tpu") or row.get("gpu") or "").split(" ")[0].lower()
    if not name:
        raise IncompleteError("no chip is named")
    try:
        return load_chip(name)
    except UserError:
        raise IncompleteError(f"the chip {name} is not known ({', '.join(chip_names())} are)") from None


def _topology(row: Mapping[str, Any], chip: Chip, assumed: list[str]) -> Topology:
    """Return the slices that a row ran on; a shape that the row does not state is added to `assumed`.

    Raises `IncompleteError` for a shape that is unknown or has another number of chips than stated.
    """
    count, slices = int(row["chips_per_slice"]), int(row.get("slices") or 1)
    shape = row.get("topology")
    if shape and not re.fullmatch(r"\d+(x\d+)*", str(shape)):
        raise IncompleteError(f"the topology {shape!r} is not a shape")
    if not shape:
        shape = slice_shape(chip, count)
        if shape is None:
            raise IncompleteError(f"no slice of {count} chips is known and no topology is stated")
        assumed.append(f"topology {shape}")
    topology = made_of(chip, shape, slices)
    if topology.num_chips != count * slices:
        raise IncompleteError(f"{count} chips a slice are stated, but {shape} has {topology.num_chips // slices}")
    return topology


def slice_shape(chip: Chip, count: int) -> str | None:
    """Return the shape of the slice with this number of chips that a cloud offers, such as `4x8x8`; None if none is
    known.
    """
    named = [Topology.parse(name) for name in slice_names() if name.startswith(f"{chip.name}-")]
    return next((each.name.partition(":")[2] for each in named if each.num_chips == count), None)


def made_of(chip: Chip, shape: str, slices: int = 1) -> Topology:
    """Return slices of this shape. Raises `IncompleteError` for a shape that the chip cannot have."""
    try:
        return Topology.parse(f"{chip.name}:{shape}" + (f"*{slices}" if slices > 1 else ""))
    except UserError as error:
        raise IncompleteError(str(error)) from None


def _sharding(text: str, topology: Topology) -> tuple[int, int, int]:
    """Parse `ICI FSDP=16,TP=4; DCN DP` or `... (data,model)=(32,4)` into numbers of devices: copies, spread, tensor.

    A degree after `DCN` without a number spans the slices; `data` is FSDP. Devices without a degree have copies. Raises
    `IncompleteError` for other texts, and for degrees that do not divide the devices.
    """
    degrees = {"copies": 1, "spread": 1, "tensor": 1}
    pair = re.search(r"\(data, ?model\) ?= ?\((\d+), ?(\d+)\)", text)
    if pair is not None:
        degrees["spread"], degrees["tensor"] = int(pair[1]), int(pair[2])
        parts = []
    else:
        parts = [part.split() for part in re.split(r"[;,]", text)]
    level = "ICI"
    for words in parts:
        if len(words) == 2 and words[0] in ("ICI", "DCN"):
            level, words = words[0], words[1:]
        name, _, size = words[0].partition("=") if len(words) == 1 else ("", "", "")
        if name.upper() not in _AXES or not (size.isdigit() or (level == "DCN" and not size)):
            raise IncompleteError(f"the sharding {text!r} is not understood")
        degrees[_AXES[name.upper()]] *= int(size) if size else topology.slices
    devices = topology.num_devices
    if devices % (degrees["copies"] * degrees["spread"] * degrees["tensor"]):
        raise IncompleteError(f"the sharding {text!r} does not make {devices} devices")
    # Devices without a named degree have copies of all parameters (data parallelism).
    degrees["copies"] *= devices // (degrees["copies"] * degrees["spread"] * degrees["tensor"])
    return degrees["copies"], degrees["spread"], degrees["tensor"]


def _step(
    row: Mapping[str, Any],
    decoder: Decoder,
    chip: Chip,
    chips: int,
    batch: int,
    assumed: list[str],
) -> tuple[int, float]:
    """Return the batch and the seconds of a step, stated or computed from the rate.

    Rates count attention in full, causal or not, unless a step time in the same row implies otherwise. A step time and
    a rate of one log line also imply a number of tokens. If the stated batch differs, the log line has priority.

    Raises `IncompleteError` if neither is stated.

    - `row`: the row with the step time, the rate and its unit.
    - `chips`: number of chips of all slices.
    - `batch`: stated sequences of a step.
    - `assumed`: list to which a batch that differs from the stated one is added.
    """
    step, value, metric, seq = row.get("step_time_s"), row["value"], str(row["metric"]), int(row["seq"])
    rate = None
    if value and _RATE.match(metric):
        rate = value * 1e12 if metric.startswith("TFLOP") else value / 100 * chip.peak_flops("bf16")
        if metric.endswith("device"):
            rate *= chip.devices_per_chip
    full, causal = (decoder.train_flops(seq, seq, half) for half in (False, True))
    if rate is None:
        if step is None:
            raise IncompleteError("neither a step time nor a rate is stated")
        return batch, float(step)
    if step is None:
        return batch, batch * full / (rate * chips)
    # Sequences of a step that step time and rate imply, with attention counted in full or half.
    counts = [step * rate * chips / flops for flops in (full, causal)]
    # Select the count that is nearest to a whole number of sequences a chip.
    if min(abs(count - batch) for count in counts) > 0.1 * batch:
        implied = min((abs(count / chips - round(count / chips)), round(count / chips)) for count in counts)[1]
        if implied >= 1:
            assumed.append(f"{implied} sequences a chip, which step time and rate imply, not {batch / chips:g}")
            batch = implied * chips
    return batch, step
