"""Measured collectives and matmuls of GPUs: writes the tables of prices, and judges them.

    python experiments/gpu/gpu_tables.py MEASURED.json --write      the package's tables from all of a file
    python experiments/gpu/gpu_tables.py MEASURED.json --left-out   each library's points priced from other libraries
    python experiments/gpu/gpu_tables.py MEASURED.json              every point with its shipped price

MEASURED.json has three parts:

- `collectives_xla`: collectives of XLA's tables, as bytes over seconds, with dims of the result and devices of a group.
- `nccl_ms`: NCCL sweeps, as milliseconds by number of elements.
- `matmuls_xla`: matmuls.
"""

import argparse
import collections
import json
import math
import pathlib
import statistics
from collections.abc import Iterator

import numpy as np

from autoshard.cost import Collectives, Compute, Topology, make_mesh


TABLES = pathlib.Path(__file__).parents[2] / "autoshard/cost/measured/gpu.json"
KINDS = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
BYTES = {"F32": 4, "BF16": 2, "half": 2, "int8": 1}
XLA = {"sm_90": "h100", "sm_100_B200": "b200", "sm_100_GB200": "gb200"}
NCCL = {"a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "gb200": "gb200"}
SOURCES = {
    "xla": "openxla/xla default_collective_perf_table.txtpb, default_matmul_perf_table.txtpb (in ROCm/xla@ac8276064)",
    "nccl": "ai-dynamo/aiconfigurator@095f58a51 systems/data/*/comm/nccl/*/nccl_perf.parquet",
    "network": "openxla/xla sol_gpu_cost_model.cc: launch and chunk of H100 and B200; others as the nearer "
    "of the two (assumed)",
}
NETWORK = {
    "a100": {"launch_s": 45e-6, "chunk_bytes": 4194304, "chunk_s": 6e-6},
    "h100": {"launch_s": 45e-6, "chunk_bytes": 4194304, "chunk_s": 6e-6},
    "h200": {"launch_s": 45e-6, "chunk_bytes": 4194304, "chunk_s": 6e-6},
    "b200": {"launch_s": 45e-6, "chunk_bytes": 4194304, "chunk_s": 2e-6},
    "gb200": {"launch_s": 45e-6, "chunk_bytes": 4194304, "chunk_s": 2e-6},
}
Points = dict[tuple[str, str, int], dict[str, list[tuple[int, float]]]]
"""Measured (bytes, seconds) of each table, by (chip, kind, devices)."""


def collectives(document: dict) -> Points:
    """Return every measured collective, with sizes as `Collectives` defines them."""
    measured: Points = collections.defaultdict(lambda: collections.defaultdict(list))
    for name, table in document["nccl_ms"].items():
        system, _, rest = name.partition("__comm__")
        if system not in NCCL:
            continue
        for key, points in table.items():
            op, dtype, devices = key.split("|")
            for elements, ms in points:
                where = measured[NCCL[system], KINDS[op], int(devices)]
                where[f"{rest.replace('__', ' ')} {dtype}"].append((elements * BYTES[dtype], ms / 1e3))
    for name, rows in document["collectives_xla"].items():
        for row in rows if name in XLA else ():
            if not row["throughput_Bps"]:
                continue
            size, pairs = math.prod(row["result_dims"]) * BYTES[row["dtype"]], row["pairs"]
            if pairs and pairs[1] == pairs[0][::-1]:
                continue  # an exchange between two devices is no shift around a ring
            devices = len(pairs) if pairs else row["groups"][1]
            whole = size * devices if row["op"] == "reduce-scatter" else size
            measured[XLA[name], row["op"], devices]["xla"].append((whole, whole / row["throughput_Bps"]))
    return measured


def used(tables: dict[str, list[tuple[int, float]]], kind: str) -> dict[str, list[tuple[int, float]]]:
    """Select the tables for a curve.

    Collectives that sum use NCCL's tables of 16-bit floats; those that move data use all of NCCL's tables. XLA's tables
    are used if NCCL's are missing.
    """
    sums = kind in ("all-reduce", "reduce-scatter")
    mine = {name: rows for name, rows in tables.items() if name != "xla" and (not sums or name.endswith("half"))}
    return mine or {name: rows for name, rows in tables.items() if name == "xla"}


def curve(tables: dict[str, list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return seconds at powers of two: the median over tables, interpolated between logarithms, made monotonic."""
    least = min(math.ceil(math.log2(min(rows)[0])) for rows in tables.values())
    most = max(math.floor(math.log2(max(rows)[0])) for rows in tables.values())
    points, last = [], 0.0
    for power in range(least, most + 1):
        seconds = []
        for rows in tables.values():
            ordered = sorted(rows)
            sizes = np.log2([size for size, _ in ordered])
            if sizes[0] <= power <= sizes[-1]:
                seconds.append(2.0 ** float(np.interp(power, sizes, np.log2([s for _, s in ordered]))))
        if seconds:
            last = max(last, statistics.median(seconds))
            points.append((2**power, float(f"{last:.4g}")))
    return points


def matmul_rates(rows: list[dict]) -> dict:
    """Return FLOP/s of bf16 matmuls on the whole grid of sizes; an unmeasured size has the mean of its neighbours."""
    sizes = [256, 512, 1024, 2048, 4096]
    batches = [1, 2, 4]
    rates = np.full((3, 5, 5, 5), np.nan)
    for row in rows:
        place = batches.index(row["b"]), *(sizes.index(row[dim]) for dim in "mnk")
        rates[place] = row["flops"]["bf16xbf16->bf16"]
    known = np.log(rates)
    whole = known.copy()
    for place in np.argwhere(np.isnan(known)):
        near = []
        for dim in range(1, 4):
            for step in (-1, 1):
                at = place.copy()
                at[dim] += step
                if 0 <= at[dim] < 5 and not np.isnan(known[tuple(at)]):
                    near.append((dim, step, known[tuple(at)]))
        pairs = [
            (low + high) / 2
            for dim in range(1, 4)
            for low in [v for d, s, v in near if d == dim and s < 0]
            for high in [v for d, s, v in near if d == dim and s > 0]
        ]
        whole[tuple(place)] = np.mean(pairs) if pairs else np.mean([value for *_, value in near])
    return {
        "batches": batches,
        "sizes": sizes,
        "measured": int((~np.isnan(known)).sum()),
        "tflops": np.round(np.exp(whole) / 1e12, 2).tolist(),
    }


def package_tables(document: dict) -> dict:
    """Build the content of the package's file."""
    chips: dict = {chip: {"network": network, "collectives": {}} for chip, network in NETWORK.items()}
    for (chip, kind, devices), tables in sorted(collectives(document).items()):
        mine = {name: rows for name, rows in used(tables, kind).items() if devices > 1}
        if mine:
            entry = chips[chip]["collectives"].setdefault(kind, {})
            entry[str(devices)] = {"tables": sorted(mine), "points": curve(mine)}
    chips["h200"]["collectives"].setdefault("collective-permute", chips["h100"]["collectives"]["collective-permute"])
    for chip in ("a100",):  # a gather of two devices equals a shift of half of the result
        two = chips[chip]["collectives"]["all-gather"]["2"]
        points = [(size // 2, seconds) for size, seconds in two["points"]]
        chips[chip]["collectives"]["collective-permute"] = {
            "2": {"tables": [f"all-gather of 2, {name}" for name in two["tables"]], "points": points}
        }
    for name, chip in (("sm_90", "h100"), ("sm_100_B200", "b200")):
        chips[chip]["matmuls"] = {"table": f"xla {name}", **matmul_rates(document["matmuls_xla"][name])}
    chips["a100"]["matmuls_as"] = chips["h200"]["matmuls_as"] = "h100"
    chips["gb200"]["matmuls_as"] = "b200"
    return {"sources": SOURCES, "chips": chips}


def priced(chip: str, kind: str, devices: int, sizes: list[int]) -> list[float]:
    """Return the package's prices in seconds for a group inside a domain."""
    prices = Collectives(make_mesh(Topology.parse(f"{chip}:{devices}"), {"x": devices}))
    return prices.time(kind, ("x",), np.array(sizes, dtype=np.float64)).tolist()  # pyrefly: ignore


def said(errors: list[tuple[int, float]]) -> str:
    """Format median errors of all points and of those from 1 MiB on."""
    large = [error for size, error in errors if size >= 1 << 20]
    return (
        f"{len(errors)} points: median {100 * statistics.median(e for _, e in errors):.1f} %, "
        f"from 1 MiB {100 * statistics.median(large):.1f} % ({len(large)})"
    )


def left_out(document: dict) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Yield by chip and library version the errors of its points, priced from the other versions alone."""
    for (chip, kind, devices), tables in sorted(collectives(document).items()):
        for out in sorted({name.rsplit(" ", 1)[0] for name in tables}):
            rest = {name: rows for name, rows in tables.items() if name.rsplit(" ", 1)[0] != out}
            if not rest or devices == 1:
                continue
            points = curve(used(rest, kind))
            sizes, seconds = np.log2([size for size, _ in points]), np.log2([each for _, each in points])
            errors = []
            for name, rows in tables.items():
                for size, measured in rows if name.rsplit(" ", 1)[0] == out else ():
                    if sizes[0] <= math.log2(size) <= sizes[-1]:
                        said_s = 2.0 ** float(np.interp(math.log2(size), sizes, seconds))
                        errors.append((size, abs(said_s / measured - 1.0)))
            yield f"{chip} without {out}", errors


def main() -> None:
    """Write the tables, or print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--left-out", action="store_true")
    arguments = parser.parse_args()
    document = json.loads(arguments.measured.read_text())
    if arguments.write:
        text = json.dumps(package_tables(document), separators=(",", ":"))
        TABLES.write_text(text.replace('},"', '},\n"').replace('],"', '],\n"') + "\n")
        return
    groups: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    if arguments.left_out:
        for name, errors in left_out(document):
            groups[name].extend(errors)
            groups[f"{name.partition(' ')[0]}, all left out"].extend(errors)
            groups["all left out"].extend(errors)
    else:
        for (chip, kind, devices), tables in sorted(collectives(document).items()):
            for name, rows in tables.items() if devices > 1 else ():
                prices = priced(chip, kind, devices, [size for size, _ in rows])
                errors = [(size, abs(ours / theirs - 1.0)) for (size, theirs), ours in zip(rows, prices, strict=True)]
                groups[f"{chip} {name.rsplit(' ', 1)[0]}"].extend(errors)
                groups["all"].extend(errors)
    for name, errors in sorted(groups.items()):
        print(f"{name}: {said(errors)}")
    for name, chip in (("sm_90", "h100"), ("sm_100_B200", "b200")):
        compute = Compute(Topology.parse(f"{chip}:1"))
        errors = []
        for row in document["matmuls_xla"][name]:
            ours = float(compute.matmul_seconds(row["m"], row["n"], row["k"], row["b"]))
            flops = 2.0 * row["b"] * row["m"] * row["n"] * row["k"]
            errors.append(abs(ours * row["flops"]["bf16xbf16->bf16"] / flops - 1.0))
        print(f"matmuls {chip}: {len(errors)}, median error {100 * statistics.median(errors):.1f} %")


if __name__ == "__main__":
    main()
