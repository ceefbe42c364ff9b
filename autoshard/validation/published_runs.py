"""Published runs of others as data, and the defaults of their frameworks."""

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
    """The dim of stacked parameters that counts layers where nothing is said: 1 in MaxText (`param_scan_axis`)."""
    return int("maxtext" in framework.lower())


def stream_on_width(framework: str) -> bool:
    """Whether tensor parallelism of a framework splits the residual stream on its width.

    MaxText's axis `tensor` does (`activation_embed` in its logical axis rules; `tensor_sequence` is another axis), and
    so does torchprime's (its configurations mark layers' outputs so). Others are taken to split the sequence.
    """
    return bool(re.search(r"maxtext|torchprime|torch_xla|tpu-recipes", framework, re.I))


FILE = pathlib.Path(__file__).with_name("published.json")
"""Rows shipped with the project; each names its source."""

_KEYS = {"id", "model", "metric", "value", "source"}
_NUMBERS = ("chips_per_slice", "slices", "seq", "per_chip_batch", "global_batch_seqs", "value", "step_time_s")
_DIMS = {"L": "layers", "D": "width", "F": "mlp_width", "N": "heads", "K": "kv_heads", "H": "head_size"}
_AXES = {"DP": "copies", "FSDP": "spread", "FSDP_TRANSPOSE": "spread", "TP": "tensor"}
_RATE = re.compile(r"TFLOP/s/(chip|device)|(?:MFU|HW utilisation) %")
LOCAL_WINDOWS = {"gemma2": (4096, 2), "gemma3": (1024, 6)}
"""Families with local attention: tokens that a local layer sees, and layers in a group that ends with a global one
(Gemma 2, 2024; Gemma 3, 2025)."""
_FLASH = re.compile(r"maxtext|tpu-recipes", re.I)
"""Sources that state `attention=flash` (MaxText's splash kernel); others compute scores in full. A row's own
`attention` goes first."""
_ATTENTIONS = ("flash", "dot_product")


class IncompleteError(Exception):
    """Why a row cannot be rebuilt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One complete row."""

    decoder: Decoder
    topology: Topology
    copies: int
    spread: int
    tensor: int
    """Devices over which parameters are whole, spread (FSDP) and split (tensor parallelism)."""
    batch: int
    seq: int
    remat: str
    saves: tuple[str, ...] | None
    """What a layer keeps for the backward pass; None: what `remat` says."""
    flash: bool
    blocks: KernelBlocks
    flags: tuple[str, ...]
    """Compiler flags that the run was made with, as far as its author states them."""
    step_s: float
    assumed: tuple[str, ...]
    optimizer: str = "adamw"
    compute: str = "bfloat16"
    """The dtype that layers compute in."""
    weights: str = "float32"
    """The dtype in which parameters are held."""
    state: str | tuple[str, str] = "float32"
    """The dtype of the optimizer's moments, or those of its first and its second ones."""
    gradients: str | None = None
    """The dtype in which the optimizer gets gradients; None: as they come."""
    accumulation: int = 1
    """Microbatches that are computed one after the other."""
    offloads: tuple[str, ...] = ()
    """Values of a layer that are kept in the host's memory for the backward pass."""
    capacity: float = 1.0
    """Slots of an expert over the mean number of its tokens; 1 has the matmuls of balanced dropless routing."""
    tiles: GroupedTiles | None = None
    """Tiles of dropless experts' kernels; None: experts have slots."""
    head_on_width: bool = False
    """FSDP splits the head on its width, so that its weights are gathered; else on its vocabulary."""

    experts: int = 1
    """Devices over which experts are split (expert parallelism); for everything else they are as those of `spread`."""
    context: int = 1
    """Devices over which sequences are split (context parallelism); parameters are spread over them too."""
    exchange: str = "auto"
    """How queries meet keys and values of other devices of `context`, of `EXCHANGES`."""
    balanced: bool = False
    """Tokens come in an order in which all parts of a sequence see as many."""
    stack_axis: int = 0
    """The dim of stacked parameters that counts layers (MaxText's `param_scan_axis`)."""
    stream_on_width: bool = False
    """Tensor parallelism splits the residual stream on its width, not on its sequence."""
    scanned: bool = True
    """Layers are a loop over stacked parameters; else they stand one after the other."""

    spreads_state: bool = False
    """The optimizer's state is spread over the devices that hold copies of the parameters (ZeRO-1)."""
    sums_late: bool = False
    """Gradients are summed once, after the backward passes of all microbatches, and whole on every device."""
    keeps_gathered: bool = False
    """Weights are gathered once a step, and kept whole in the compute dtype for the backward pass."""
    pipeline: Pipeline | None = None
    """Stages that stand on devices of their own; each holds layers whole, spread and split as the other degrees say."""
    network: tuple[tuple[str, int], ...] = ()
    """How many slices a mesh axis spans; empty: the first axes span them."""

    @property
    def kernels(self) -> GroupedKernels | None:
        """How dropless experts' kernels run on the devices."""
        if self.tiles is None or self.decoder.experts == 1:
            return None
        chip = self.topology.chip
        cores = max(1, chip.cores_per_chip // chip.devices_per_chip)
        return GroupedKernels(self.tiles, self.copies * self.spread * self.context, self.experts, cores)

    def flops(self, causal: bool) -> float:
        """Model FLOPs of a step: 6 per matmul parameter and token, and attention; causal counts half of it."""
        return self.decoder.train_flops(self.batch * self.seq, self.seq, causal)

    @property
    def peak_s(self) -> float:
        """Seconds of a step at the chips' peak: over those of a run it is the MFU."""
        return self.flops(causal=True) / (self.topology.peak_flops("bf16") * self.topology.num_devices)


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulRun:
    """A measured matmul [n, n] x [n, n] on one device."""

    size: int
    topology: Topology
    step_s: float


def is_published(path: str | pathlib.Path) -> bool:
    """Whether a file holds published runs; False for worked questions.

    The first row that is of either form tells. Raises: UserError for a file that cannot be read, or has none.
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
    """Rows of a file of this form. Those of another form are left out if there is a list `bad` for what is wrong.

    Raises: UserError for a file that cannot be read, and without `bad` for a row of another form.
    """
    file = FILE if path is None else pathlib.Path(path)
    found = []
    for number, row in enumerate(_rows(file)):
        try:
            _check_row(row, f"{file}, row {number}")
        except UserError as error:
            if bad is None:
                raise
            bad.append(str(error))
        else:
            found.append(row)
    return found


def _check_row(row: Any, origin: str) -> None:
    if not isinstance(row, dict) or not row.keys() >= _KEYS:
        missing = sorted(_KEYS - row.keys()) if isinstance(row, dict) else sorted(_KEYS)
        raise UserError(f"{origin} of the published runs misses {', '.join(missing)}")
    given = row.get("assume")
    for part in (row, given) if isinstance(given, dict) else (row,):
        _check_values(part, f"{origin} ({row['id']})")


def _check_values(row: Mapping[str, Any], origin: str) -> None:
    """Refuse values of another kind than their keys have; null stands for what is not stated."""
    for key in ("id", "model", "metric", "source"):
        if key in row and not isinstance(row[key], str):
            raise UserError(f"{origin}: {key} is {row[key]!r}, expected a text")
    for key in _NUMBERS:
        value = row.get(key)
        if value is not None and not (_is_number(value) and value > 0):
            raise UserError(f"{origin}: {key} is {value!r}, expected a number above 0, or null if it is not stated")
    saves = row.get("saves")
    if saves is not None and not (isinstance(saves, list) and set(saves) <= set(SAVABLE)):
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
    """Refuse `attention_blocks` that are not those of `KernelBlocks`."""
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
    return tuple(value) if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rows(file: pathlib.Path) -> list[Any]:
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
    """A row as a run. Raises `IncompleteError` with what is missing."""
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
    name = str(row.get("tpu") or row.get("gpu") or "").split(" ")[0].lower()
    if not name:
        raise IncompleteError("no chip is named")
    try:
        return load_chip(name)
    except UserError:
        raise IncompleteError(f"the chip {name} is not known ({', '.join(chip_names())} are)") from None


def _topology(row: Mapping[str, Any], chip: Chip, assumed: list[str]) -> Topology:
    count, slices = int(row["chips_per_slice"]), int(row.get("slices") or 1)
    shape = row.get("topology")
    if shape and not re.fullmatch(r"\d+(x\d+)*", str(shape)):
        raise IncompleteError(f"the topology {shape!r} is not a shape")
    if not shape:
        shape = slice_shape(chip, count)
        if shape is None:
            raise IncompleteError(f"no slice of {count} chips is known and no topology is stated")
        assumed.append(f"topology {shape}")
    found = made_of(chip, shape, slices)
    if found.num_chips != count * slices:
        raise IncompleteError(f"{count} chips a slice are stated, but {shape} has {found.num_chips // slices}")
    return found


def slice_shape(chip: Chip, count: int) -> str | None:
    """The shape of the slice of so many chips that a cloud offers, such as `4x8x8`; None if none is known."""
    named = [Topology.parse(name) for name in slice_names() if name.startswith(f"{chip.name}-")]
    return next((each.name.partition(":")[2] for each in named if each.num_chips == count), None)


def made_of(chip: Chip, shape: str, slices: int = 1) -> Topology:
    """Slices of a shape. Raises `IncompleteError` for a shape that the chip cannot have."""
    try:
        return Topology.parse(f"{chip.name}:{shape}" + (f"*{slices}" if slices > 1 else ""))
    except UserError as error:
        raise IncompleteError(str(error)) from None


def _sharding(text: str, topology: Topology) -> tuple[int, int, int]:
    """`ICI FSDP=16,TP=4; DCN DP` or `... (data,model)=(32,4)` as numbers of devices: copies, spread, tensor."""
    found = {"copies": 1, "spread": 1, "tensor": 1}
    pair = re.search(r"\(data, ?model\) ?= ?\((\d+), ?(\d+)\)", text)
    if pair is not None:
        found["spread"], found["tensor"] = int(pair[1]), int(pair[2])
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
        found[_AXES[name.upper()]] *= int(size) if size else topology.slices
    devices = topology.num_devices
    if devices % (found["copies"] * found["spread"] * found["tensor"]):
        raise IncompleteError(f"the sharding {text!r} does not make {devices} devices")
    # What is not named is replicated: pure data parallelism.
    found["copies"] *= devices // (found["copies"] * found["spread"] * found["tensor"])
    return found["copies"], found["spread"], found["tensor"]


def _step(
    row: Mapping[str, Any],
    decoder: Decoder,
    chip: Chip,
    chips: int,
    batch: int,
    assumed: list[str],
) -> tuple[int, float]:
    """Batch, and seconds of a step: as stated, or from the rate.

    Rates count attention in full, causal or not, unless a step time beside them says otherwise. A step time and a rate
    of one log line also say how many tokens the line is about; where the stated batch differs, the line is believed.
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
    counts = [step * rate * chips / flops for flops in (full, causal)]
    if min(abs(count - batch) for count in counts) > 0.1 * batch:
        told = min((abs(count / chips - round(count / chips)), round(count / chips)) for count in counts)[1]
        if told >= 1:
            assumed.append(f"{told} sequences a chip, which step time and rate imply, not {batch / chips:g}")
            batch = told * chips
    return batch, step
