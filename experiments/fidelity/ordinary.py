"""Ordinary training steps, predicted against the TPU and GPU compilers, and their plans against simple ones.

    python experiments/fidelity/ordinary.py [--seeds 0-39] [--topologies v5e:2x4 ...] [--against] [--again] [--write]

Programs are those of `lib/programs/ordinary_programs.py`. A row is one seed on one topology and mesh; it takes two to
thirty seconds. A row that is there takes less with `--again`: the plan is compiled only if it has changed. Memory is
compared with what the compiled program reserves, time with the compiler's schedule. `--against` compiles data, tensor
and ZeRO-1 parallelism and FSDP (by pins) too. `--limit` plans again within the memory that the compiler reserved, and
compiles that plan: one that is foreseen to fit must. `--write` stores the errors by class of ops in
`autoshard/planning/explain/prediction_errors.json`, from all saved rows; plans state them. Seeds below zero are
state-space models (`--seeds=-42--40`), and below -99 graph networks with attention (`--seeds=-105--100`).
"""

import collections
import functools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from experiments.lib.harness import ROOT, Experiment, Rows, grid, own_parser, page
from experiments.lib.programs.ordinary_programs import kind_of, ordinary
from experiments.lib.saved_results import Results, figures_digest


if TYPE_CHECKING:
    from autoshard.planning import Plan
    from autoshard.program import Program

MESHES = {
    "v5e:2x4": ("d=8", "a=2,b=4"),
    "v6e:2x4": ("d=8", "a=2,b=4"),
    "v5p:2x2x2": ("d=8", "a=2,b=4"),
    "h100:8": ("d=8", "a=2,b=4"),
}
"""Topologies, each of eight devices, with the meshes that seeds take in turn."""
ERRORS = ROOT / "autoshard" / "planning" / "explain" / "prediction_errors.json"
"""File of the errors by class of ops, which the package reads."""
STORED = ("parameter", "optimizer_state")
SIMPLE = {"dp": ((), None), "zero1": (STORED[1:], None), "fsdp": (STORED, None), "tp": (STORED, -1)}
"""Simple plans: the roles of arguments that each splits, besides the batch, and the axis from which on (None: all)."""


def name_of(seed: int, topology: str) -> str:
    """Return the name of a row: odd seeds have a mesh of two axes."""
    return f"{seed:03d} {topology} {MESHES[topology][seed % 2]}"


def judge(
    name: str, against: bool = False, limit: bool = False, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Plan and compile one row; with `against` the simple plans too, with `limit` a plan within the compiled memory.

    Compiled figures are those of the `known` row where the inputs of the compilation have not changed.
    """
    seed, topology, mesh = name.split()
    program = _program(int(seed))
    sizes = {axis: int(size) for axis, _, size in (part.partition("=") for part in mesh.split(","))}
    known = known or {}
    row: dict[str, Any] = {"kind": kind_of(int(seed))} | _figures(program, topology, sizes, {}, known)
    if against and "error" not in row:
        axes = tuple(sizes)
        row["against"] = {
            simple: _figures(
                program,
                topology,
                sizes,
                _pins(program, row["kind"], axes, roles, model),
                known.get("against", {}).get(simple, {}),
            )
            for simple, (roles, model) in SIMPLE.items()
        }
    if limit and "error" not in row:
        row["limited"] = _figures(program, topology, sizes, {}, known.get("limited", {}), row["memory"]["compiled"])
    return row


@functools.lru_cache(maxsize=1)
def _program(seed: int) -> "Program":
    return ordinary(seed)


def _figures(
    program: "Program",
    topology: str,
    mesh: Mapping[str, int],
    pins: Mapping[str, Any],
    known: Mapping[str, Any],
    limit: int | None = None,
) -> dict[str, Any]:
    """Plan under the pins within `limit` bytes, and return predicted and compiled figures, or the error.

    - `known`: figures of the row as it was; empty if there are none.
    """
    from autoshard.errors import UserError
    from autoshard.planning import Options, make_plan
    from autoshard.planning.space.user_constraints import read_asked

    try:
        options = Options(topology=topology, mesh=mesh, asked=read_asked(pins=pins), memory_limit=limit)
        plan: Plan = make_plan(program, options).plan
        inputs = figures_digest(program, plan)
        compiled = known if known.get("inputs") == inputs else _compiled(program, plan)
    except UserError as error:
        return {"error": str(error)[:300]}
    prediction = plan.prediction
    predicted = {
        "memory": {"predicted": prediction.peak_bytes, "predicted_by_kind": dict(prediction.memory)},
        "wire": {"predicted": sum(prediction.wire_bytes.values())},
        "seconds": {"predicted": prediction.step_time_s},
    }
    return {
        "inputs": inputs,
        "verdict": compiled["verdict"],
        **{what: compiled[what] | figures for what, figures in predicted.items()},
        "unforeseen": compiled["unforeseen"],
        "classes": _class_shares(program, plan),
        "specs": {argument: str(spec) for argument, spec in plan.arguments.items()},
    }


def _compiled(program: "Program", plan: "Plan") -> dict[str, Any]:
    """Compile the plan and return the figures of the compiled program. Raises `UserError` as `compile_plan` does."""
    from autoshard.exec.ahead.compile_plans import compile_figures, compile_plan

    figures = compile_figures(compile_plan(program, plan, 600.0, quick=True))
    reserved = figures["memory"]["compiled"]
    timed = figures["time"] or {}
    return {
        "verdict": figures["verdict"],
        "memory": {
            "compiled": figures["peak_bytes"]["reserved"],
            "compiled_by_kind": figures["memory"]["compiled_at_peak"],
        }
        | {part: reserved[part] for part in ("arguments", "results", "donated", "temporaries") if part in reserved},
        "wire": {"compiled": sum(axis["compiled"] for axis in figures["wire_bytes"].values())},
        "seconds": {
            "compiled": figures["step_time_s"]["estimated"],
            "exposed": timed.get("exposed_comm_s"),
            "by_kind": timed.get("by_kind"),
        },
        "unforeseen": max((each["share"] for each in figures["unforeseen"]), default=0.0),
    }


def _class_shares(program: "Program", plan: "Plan") -> dict[str, tuple[float, float]]:
    """Return the shares of time and memory of each class of ops whose errors plans state."""
    from autoshard.planning.explain.prediction_errors import class_shares
    from autoshard.planning.price.step_ledger import itemise

    priced = plan.graph(program).priced
    return class_shares(itemise(priced.model, priced.choices), priced.prices, plan.prediction.step_time_s)


def class_errors(known: Rows) -> dict[str, Any]:
    """Return the content of `ERRORS`: by compiler and class of ops the factors within which nine of ten rows are.

    A row belongs to each class whose errors count for it, as plans decide it.
    """
    from autoshard.planning.explain.prediction_errors import counts

    found: dict[str, dict[str, list[tuple[float, float]]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for name, row in known.items():
        compiler = "GPU" if "h100" in name.split()[1] else "TPU"
        for ops, shares in row.get("classes", {}).items():
            if counts(*shares):
                found[compiler][ops].append((_ratio(row["seconds"]), _ratio(row["memory"])))
    errors = {
        compiler: {
            ops: {"programs": len(ratios)}
            | {what: _factor(each) for what, each in zip(("time", "memory"), zip(*ratios, strict=True), strict=True)}
            for ops, ratios in sorted(classes.items())
        }
        for compiler, classes in sorted(found.items())
    }
    return {"source": "experiments/results/ordinary.json", "errors": errors}


def _factor(ratios: Iterable[float]) -> float:
    """Return the factor within which nine of ten ratios are of 1, rounded up to two digits after the point."""
    factors = sorted(max(ratio, 1 / ratio) for ratio in ratios)
    return -(-factors[int(0.9 * (len(factors) - 1) + 0.5)] * 100 // 1) / 100


def _pins(
    program: "Program", kind: str, axes: tuple[str, ...], split: Iterable[str], model: int | None = None
) -> dict[str, Any]:
    """Return pins of a simple plan: the batch is split, and arguments of the roles `split` along their largest dim.

    The axes from `model` on split these arguments, those before it the batch; all axes split both where it is None.
    """
    pins = {}
    batch_axes, stored_axes = axes[:model], axes[model or 0 :]
    for argument in program.arguments:
        shape, role, dim = argument.shape, argument.role.value, None
        if role == "batch":
            # Only the edges of a graph are its batch.
            if kind != "graph" or argument.dtype == "int32":
                dim = 1 if kind == "lstm" else 0
        elif role in split:
            fitting = [(size, -i) for i, size in enumerate(shape) if size % 8 == 0 and size >= 64]
            dim = -max(fitting)[1] if fitting else None
        over = batch_axes if role == "batch" else stored_axes
        pins[argument.name] = tuple(over or None if i == dim else None for i in range(len(shape)))
    return pins


def table(known: Rows) -> str:
    """Return the page: errors by kind and by topology, then every row."""
    groups: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    regrets: dict[str, list[float]] = collections.defaultdict(list)
    wires, lines, errors = [], [], []
    for name, row in known.items():
        if "error" in row:
            errors.append(f"- {name} ({row['kind']}): {row['error']}")
            continue
        memory = _ratio(row["memory"])
        seconds = _ratio(row["seconds"])
        wire = _ratio(row["wire"])
        topology = name.split()[1]
        for group in ("all", topology, row["kind"], f"{row['kind']}, {'GPU' if 'h100' in topology else 'TPU'}"):
            groups[group].append((memory, seconds))
        wires.append((abs(wire - 1) <= 0.05, row["unforeseen"] <= 0.05))
        best = _best(row)
        if best:
            regrets["all"].append(best[0])
            regrets[topology].append(best[0])
        lines.append(
            [
                *(name, row["kind"], f"{row['memory']['compiled'] / 2**20:.0f}", f"{memory:.2f}"),
                *(f"{row['seconds']['compiled'] * 1e3:.2f}", f"{seconds:.2f}", f"{wire:.2f}"),
                *(f"{row['unforeseen']:.0%}", f"{best[0]:.2f} ({best[1]})" if best else "-"),
            ]
        )
    return page(
        "# Ordinary training steps against the compilers",
        """
`python experiments/fidelity/ordinary.py`; libtpu and JAX's CUDA plugin, no devices. Predicted over compiled: memory is
what the program reserves on a device, time that of the compiler's schedule. `regret` is the plan's time over that of
the best of data parallelism, ZeRO-1, FSDP and tensor parallelism (weights over the last axis), all compiled.
""",
        grid(
            "group | rows: | memory error: | 90th: | least: | most: | time error: | 90th: | least: | most:",
            [
                [group, len(rows), *_spread([m for m, _ in rows]), *_spread([t for _, t in rows])]
                for group, rows in groups.items()
            ],
        ),
        [
            f"Bytes on the wire within 5 % in {sum(w for w, _ in wires)} of {len(wires)} rows; no unforeseen "
            f"collective above 5 % of all bytes in {sum(u for _, u in wires)}.",
            *(
                f"- {group}: the plan takes {statistics.geometric_mean(each):.2f} of the best simple plan's time "
                f"in the geometric mean of {len(each)}, {min(each):.2f} to {max(each):.2f}"
                for group, each in regrets.items()
            ),
            *_limited(known),
            *errors,
        ],
        grid("row | kind | MiB: | memory: | ms: | time: | wire: | unforeseen: | regret", lines),
    )


def _limited(known: Rows) -> list[str]:
    """Return the sentence about plans within the memory that the compiler reserved, and those that need more."""
    rows = {
        name: row["limited"] | {"limit": row["memory"]["compiled"]} for name, row in known.items() if "limited" in row
    }
    if not rows:
        return []
    fitting = {name: row for name, row in rows.items() if "error" not in row}
    false = [
        f"{name} ({row['memory']['compiled'] / row['limit']:.2f})"
        for name, row in fitting.items()
        if row["memory"]["compiled"] > row["limit"]
    ]
    return [
        f"Planned again within the bytes that the compiler reserved: {len(fitting)} of {len(rows)} rows have a plan; "
        f"{len(false)} of these need more when compiled{': ' if false else ''}{', '.join(false)}."
    ]


def _ratio(figures: Mapping[str, float]) -> float:
    """Return predicted over compiled; 1 where nothing is either."""
    return (
        figures["predicted"] / figures["compiled"] if figures["compiled"] else float(figures["predicted"] == 0) or 9.99
    )


def _best(row: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return the plan's time over that of the best simple plan that fits, and its name; None without any."""
    others = {
        name: each["seconds"]["compiled"]
        for name, each in row.get("against", {}).items()
        if "error" not in each and each["seconds"]["compiled"]
    }
    if not others:
        return None
    name = min(others, key=lambda each: others[each])
    return row["seconds"]["compiled"] / others[name], name


def _spread(values: list[float]) -> list[str]:
    errors = sorted(abs(value - 1) for value in values)
    ninth = errors[int(0.9 * (len(errors) - 1))]
    return [f"{statistics.median(errors):.1%}", f"{ninth:.0%}", f"{min(values):.2f}", f"{max(values):.2f}"]


def main() -> int:
    parser = own_parser()
    parser.add_argument("--seeds", metavar="FIRST-LAST", help="seeds to run (default: 0-39)")
    parser.add_argument("--topologies", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--against", action="store_true", help="compile simple plans too")
    parser.add_argument("--limit", action="store_true", help="plan again within what the compiler reserved")
    parser.add_argument("--write", action="store_true", help="store the errors by class of ops for the package")
    given = parser.parse_args()
    bounds = re.fullmatch(r"(-?\d+)(?:-(-?\d+))?", given.seeds or "0-39")
    if bounds is None:
        parser.error(f"--seeds {given.seeds}: expected FIRST-LAST")
    seeds = range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    names = [name_of(seed, topology) for topology in given.topologies for seed in seeds]
    known = Results(given.out / "ordinary.json").rows

    def work(name: str) -> dict[str, Any]:
        return judge(name, given.against, given.limit, known.get(name))

    code = Experiment(script=__file__, names=names, work=work, table=table).run(given)
    if given.write:
        known = Results(given.out / "ordinary.json").rows
        ERRORS.write_text(json.dumps(class_errors(known), indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
