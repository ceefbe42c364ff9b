"""Plans for every TPU generation, predicted against the result of the real TPU compiler.

    python experiments/fidelity/compile_fidelity.py [--only TEXT ...] [--again] [--predict] [--whole]

Every row runs in a process of its own with a time limit. Results are saved by row in
`experiments/results/compile_fidelity.json`, so that a broken run resumes. Scheduled programs are stored under
`build/compile_fidelity`, and a plan that was compiled before is not compiled again. `--predict` only plans. Programs
are compiled until every value has its place in memory (`autoshard compile --quick`), or with machine code (`--whole`).
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.lib.harness import Experiment, Rows, chosen, grid, own_parser, page
from experiments.lib.programs.compile_programs import (
    hf,
    jax_decoder,
    jax_mamba,
    jax_mlp,
    jax_rwkv,
    jax_table,
    llama,
    mixtral,
)
from experiments.lib.saved_results import compiled


if TYPE_CHECKING:
    from autoshard.program import Program


@dataclasses.dataclass(frozen=True)
class Row:
    """One program under one plan on one topology."""

    name: str
    program: "Callable[[], Program]"
    topology: str
    mesh: dict[str, int]
    plan: str = "ours"
    """`ours`, or the name of a baseline, completed by the solver."""
    limit: float = 1.0
    """Share of the chip's memory that the plan may use: above 1 for a plan that should not fit."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Rows of one script."""

    script: str
    """`__file__` of the script."""
    title: str
    rows: tuple[Row, ...]
    compiler: str = "libtpu, no TPU"


def dm(data: int, model: int, slices: int = 1) -> dict[str, int]:
    return ({"slice": slices} if slices > 1 else {}) | {"data": data, "model": model}


def train(config: Any, batch: int, seq: int, remat: str = "full", **options: Any) -> "Callable[[], Program]":
    return hf(config, train=True, batch=batch, seq=seq, remat=remat, **options)


def serve(config: Any, kind: str, batch: int, seq: int, **options: Any) -> "Callable[[], Program]":
    """Return a step of decoding with caches of `seq` tokens, or a prefill step that fills caches of `seq` tokens."""
    return hf(config, serve=kind, batch=batch, seq=seq, **options)


SMALL = llama(8, 2048, 5632, 16, 8, 32000)
WIDE = llama(8, 4096, 11008, 32, 8, 32000)
EXPERTS = mixtral(4, 2048, 7168, 16, 8, 8, 32000)

ROWS = (
    # One slice, with free memory.
    Row("llama-fsdp-v5e", train(SMALL, 64, 1024), "v5e:4x4", {"data": 16}, "fsdp"),
    Row("llama-tp-v5e", train(SMALL, 32, 1024), "v5e:4x4", dm(4, 4), "tensor_parallel"),
    Row("llama-fsdp_tp-v5p", train(WIDE, 64, 2048, "dots"), "v5p:2x4x4", dm(8, 4), "fsdp_tp"),
    Row("llama-ours-v5p", train(WIDE, 128, 2048), "v5p:4x4x4", dm(16, 4)),
    Row("llama-tp_sp-v6e", train(WIDE, 32, 2048), "v6e:4x8", dm(4, 8), "tensor_parallel_sp"),
    Row("llama-ours-tpu7x", train(WIDE, 64, 2048), "tpu7x:2x2x4", dm(8, 4)),
    Row("llama-fsdp-v4", train(SMALL, 128, 1024), "v4:4x4x4", {"data": 64}, "fsdp"),
    Row("experts-ours-v5p", train(EXPERTS, 32, 1024), "v5p:2x2x4", dm(4, 4)),
    Row("vit-dp-v6e", hf("vit-l16", train=True, batch=256), "v6e:4x4", {"data": 16}, "data_parallel"),
    Row("llama-infer-v5e", hf(WIDE, infer=True, batch=16, seq=2048), "v5e:2x4", dm(2, 4)),
    Row("jax-decoder-v4", jax_decoder(8, 2048, 8192, 16, 32000, 64, 1024), "v4:2x2x4", dm(4, 4)),
    # Recurrences, and a table whose rows do not fill a register.
    Row("mamba-v5e", jax_mamba(2, 1024, 2048, 16, 32, 1024), "v5e:4x4", {"data": 16}, "data_parallel"),
    Row("rwkv-v5e", jax_rwkv(2, 1024, 16, 64, 64), "v5e:2x4", {"data": 8}, "data_parallel"),
    Row("table-v5e", jax_table(1 << 20, 64, 4, 256, 65536), "v5e:4x4", {"data": 16}),
    # One slice, nearly full.
    Row("llama-fsdp-v5e-full", train(SMALL, 128, 1024, "none"), "v5e:4x4", {"data": 16}, "fsdp", 1.3),
    Row("jax-mlp-v5e-full", jax_mlp(12, 4096, 524288), "v5e:2x4", {"data": 8}, "fsdp", 1.3),
    Row("gpt2-xl-v6e-full", train("gpt2-xl", 256, 1024, "dots"), "v6e:4x4", dm(4, 4), "ours", 1.3),
    Row("llama-tp-v4-full", train(WIDE, 32, 2048, "none"), "v4:2x2x4", dm(4, 4), "fsdp_tp", 1.3),
    Row("jax-decoder-v5e-full", jax_decoder(8, 2048, 8192, 16, 32000, 768, 1024), "v5e:4x4", dm(4, 4), "ours", 1.3),
    Row("llama-fsdp-v5p-full", train(WIDE, 384, 4096), "v5p:2x2x4", {"data": 16}, "fsdp", 1.3),
    Row("llama-tpu7x-full", train(WIDE, 40, 4096, "none"), "tpu7x:2x2x2", dm(8, 2), "fsdp_tp_sp", 1.3),
    # Several slices.
    Row("llama-ours-v5e*2", train(SMALL, 64, 1024), "v5e:4x4*2", dm(4, 4, 2)),
    Row("llama-fsdp-v6e*2", train(SMALL, 64, 1024), "v6e:4x4*2", {"slice": 2, "data": 16}, "fsdp"),
    Row("llama-ours-v5p*2", train(WIDE, 64, 2048), "v5p:2x2x4*2", {"slice": 2, "data": 16}),
    Row("llama-ours-v4*2", train(SMALL, 64, 1024), "v4:2x2x4*2", {"slice": 2, "data": 16}),
    Row("llama-fsdp_tp-tpu7x*2", train(WIDE, 64, 2048), "tpu7x:2x2x1*2", {"slice": 2, "model": 8}, "fsdp_tp"),
    # Serving.
    Row("prefill-8b-v6e", serve("llama3-8b", "prefill", 8, 8192), "v6e:2x4", dm(2, 4)),
    Row("prefill-70b-v5p", serve("llama3-70b", "prefill", 16, 4096), "v5p:2x2x4", dm(4, 4)),
    Row("prefill-experts-v5p", serve("mixtral-8x7b", "prefill", 16, 4096), "v5p:2x2x4", dm(4, 4)),
    Row("decode-8b-v6e", serve("llama3-8b", "decode", 64, 8192), "v6e:2x4", dm(2, 4)),
    Row("decode-8b-v6e-full", serve("llama3-8b", "decode", 96, 8192), "v6e:2x4", dm(2, 4)),
    Row("decode-8b-v5e", serve("llama3-8b", "decode", 64, 4096), "v5e:4x4", dm(4, 4)),
    Row("decode-70b-v6e-full", serve("llama3-70b", "decode", 96, 8192), "v6e:4x4", dm(8, 2)),
    Row("decode-experts-v6e", serve("mixtral-8x7b", "decode", 64, 4096), "v6e:4x4", dm(4, 4)),
    # A whole model.
    Row("llama3-8b-v5p", train("llama3-8b", 64, 8192), "v5p:4x8x8", dm(32, 8)),
)

MATRIX = Matrix(__file__, "Plans predicted against the TPU compiler", ROWS)


def run(row: Row, time_limit: float, predict_only: bool, whole: bool) -> dict[str, Any]:
    """Plan, compile (unless this very plan was compiled before) and compare one row."""
    from autoshard import UserError
    from autoshard.cost import Topology
    from autoshard.exec import compile_figures
    from autoshard.exec.ahead.compile_plans import report
    from autoshard.planning import Options, make_plan

    program = row.program()
    began = time.monotonic()
    limit = int(Topology.parse(row.topology).usable_bytes * row.limit)
    made = make_plan(program, Options(topology=row.topology, mesh=row.mesh, memory_limit=limit))
    plan_s = time.monotonic() - began
    plan = made.plan if row.plan == "ours" else made.baseline_plans.get(row.plan)
    if plan is None:
        raise UserError(f"no baseline {row.plan} here, only {', '.join(made.baseline_plans)}")
    prediction = plan.prediction
    figures: dict[str, Any] = {
        "plan": row.plan,
        "topology": row.topology,
        "mesh": row.mesh,
        "limit_bytes": Topology.parse(row.topology).usable_bytes,
        "plan_s": plan_s,
        "predicted": {
            "memory": prediction.memory,
            "peak_bytes": prediction.peak_bytes,
            "peak_at": prediction.peak_at,
            "step_time_s": prediction.step_time_s,
            "wire_bytes": prediction.wire_bytes,
        },
    }
    if predict_only:
        return figures
    left = compiled("compile_fidelity", program, plan, time_limit, whole)
    figures["whole"] = left.coded
    compiled_figures = compile_figures(report(program, plan, left))
    if compiled_figures["time"]:
        del compiled_figures["time"]["spans"]  # thousands of lines in each row
    for record in (*compiled_figures["collectives"], *compiled_figures["unforeseen"]):
        record["line"] = record["line"].rpartition("/")[2]  # the file's name only, without the machine's folders
    return figures | compiled_figures


def main(matrix: Matrix) -> int:
    """Run the command of a script with such rows."""
    from autoshard import UserError

    parser = own_parser(time_limit=900.0)
    parser.add_argument("--predict", action="store_true", help="only plan, and print what is predicted")
    parser.add_argument("--whole", action="store_true", help="compile with machine code, minutes a row")
    given = parser.parse_args()
    rows = {row.name: row for row in matrix.rows}

    def work(name: str) -> dict[str, Any]:
        try:
            return run(rows[name], given.time_limit, given.predict, given.whole)
        except UserError as error:
            return {"error": str(error)}

    if given.predict:
        for name in chosen(rows, given.only):
            print(f"{name:<24} {_predicted(work(name))}", flush=True)
        return 0
    return Experiment(
        script=matrix.script,
        names=rows,
        work=work,
        table=lambda known: table(matrix, known),
        apart=True,
        limit_s=given.time_limit + 300,
    ).run(given)


def _predicted(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    figures = row["predicted"]
    peak = figures["peak_bytes"]
    return (
        f"{peak / 2**30:7.2f} GiB {peak / row['limit_bytes']:7.1%} {row['plan_s']:6.1f} s "
        f"{figures['memory']} at {figures['peak_at'][-60:]}"
    )


def table(matrix: Matrix, known: Rows) -> str:
    """Return the results as a page of Markdown."""
    done = {name: result for name, result in known.items() if "error" not in result}
    lines = []
    memory, shares, wires, seconds, false, agree, judged = [], [], [], [], 0, 0, 0
    for name, result in done.items():
        peak, limit = result["peak_bytes"], result["limit_bytes"]
        ratio = peak["predicted"] / peak["compiled"] if peak["compiled"] else None
        if ratio:
            memory.append(abs(ratio - 1))
            shares.append(abs(peak["predicted"] - peak["compiled"]) / limit)
        ours = "fits" if peak["predicted"] <= limit else "does not fit"
        theirs = result["verdict"]
        false += ours == "fits" and theirs == "does not fit"
        if abs(peak["predicted"] / limit - 1) > 0.1:
            judged += 1
            agree += ours == theirs
        axes = []
        for axis, wire in result["wire_bytes"].items():
            if wire["compiled"] > 0.01 * sum(w["compiled"] for w in result["wire_bytes"].values()):
                axes.append(f"{axis} {wire['predicted'] / wire['compiled']:.2f}")
                wires.append(abs(wire["predicted"] / wire["compiled"] - 1))
        total = [sum(w[key] for w in result["wire_bytes"].values()) for key in ("predicted", "compiled")]
        blamed = f"{len(result['unforeseen'])}: {sum(u['share'] for u in result['unforeseen']):.0%}"
        times = result["step_time_s"]
        if times["estimated"]:
            seconds.append(abs(times["predicted"] / times["estimated"] - 1))
        cells = [name, result["topology"], result["plan"], f"{peak['predicted'] / 2**30:.2f}"]
        cells += [f"{(peak['compiled'] or 0) / 2**30:.2f}", f"{ratio:.2f}" if ratio else "-", f"{limit / 2**30:.2f}"]
        cells += [f"{ours} / {theirs}", f"{total[0] / total[1]:.2f}" if total[1] else "-", ", ".join(axes)]
        cells += [blamed if result["unforeseen"] else "-", f"{times['predicted']:.4g}"]
        lines.append([*cells, f"{times['estimated'] or 0:.4g}", _compile_time(result), result["code"]])
    script = Path(matrix.script)
    unforeseen = _unforeseen_lines(done)
    return page(
        f"# {matrix.title}",
        f"""
`python experiments/{script.parent.name}/{script.name}`; {matrix.compiler}. Bytes of one device, GiB. `memory` and \
`wire` are
predicted over compiled; `wire` is of all axes together; `code` is the commit whose predictions these are.
"""
        """"""
        "",
        grid(
            "row | topology | plan | predicted | compiled | memory | limit | verdicts | wire | by axis | unforeseen | "
            "step s predicted | estimated | compile s | code",
            lines,
        ),
        *(["Unforeseen, of all bytes on the wire:", unforeseen] if unforeseen else []),
        [
            f"Memory: {_spread(memory)}. Bytes on the wire by axis: {_spread(wires)}.",
            f"Memory, as a share of what the chip has: {_spread(shares)}.",
            f"Time, predicted over that of the compiler's schedule: {_spread(seconds)}.",
            f"Predicted to fit where the compiler finds that they do not: {false}.",
            f"Verdicts agree in {agree} of {judged} rows predicted more than 10 % away from the limit.",
            *(f"- {name}: {result['error']}" for name, result in known.items() if "error" in result),
            *(
                f"- {row.name} ({row.topology}, {row.plan}): not compiled"
                for row in matrix.rows
                if row.name not in known
            ),
        ],
    )


def _compile_time(result: dict[str, Any]) -> str:
    """Return the seconds of compilation, marked if machine code was left out."""
    return f"{result['compile_s']:.0f}" + ("" if result.get("whole", True) else " (quick)")


def _unforeseen_lines(done: Rows) -> list[str]:
    """List the unforeseen collectives of more than 1 % of their row's bytes, with their specs and notes."""
    lines = []
    for name, result in done.items():
        for row in result["unforeseen"]:
            specs = f", {row['before']} -> {row['after']}" if row["after"] else ""
            note = f" ({row['note']})" if row["note"] else ""
            lines.append(
                f"- {name}, {row['share']:.1%}: {row['count']} x {row['kind']} over {'+'.join(row['axes'])}, "
                f"`{row['op'].rpartition('/')[2] or row['op']}`{specs}{note}"
            )
    return lines


def _spread(errors: list[float]) -> str:
    if not errors:
        return "no rows"
    ordered = sorted(errors)
    ninth = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
    return f"median error {statistics.median(ordered):.1%}, 90th percentile {ninth:.1%}, worst {ordered[-1]:.1%}"


if __name__ == "__main__":
    sys.exit(main(MATRIX))
