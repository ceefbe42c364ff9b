"""Call in whose process libtpu, or the GPU compiler, runs.

It reads `plan.json`, `module.mlirbc`, `job.json` and the bodies of calls (`call-N.mlirbc`) from a folder. It writes
`program.hlo` (the scheduled HLO) and `program.live` (the live ranges at the peak) there. libtpu may abort or never
return. Therefore the parent (`ahead_process`) limits its time. The exit handlers of libtpu can hang too, so the parent
kills the process.
"""

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from autoshard.errors import UserError


_NO_TILES = "Couldn't find output tile sizes"
"""Error of Triton's matmuls for some shapes that no device can time. The step is then compiled with library matmuls."""


def compile_files(folder: str) -> dict[str, Any]:
    """Compile the job in a folder and return its result, see `_compile`; `UserError` is raised.

    Any other error prints a traceback and ends the process with code 1.
    """
    directory = Path(folder)
    try:
        return _compile(directory, json.loads((directory / "job.json").read_text()))
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        os._exit(1)


def _compile(directory: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Compile the program under the plan and return `status`: `done`, `refused`, `failed` or `memory`.

    `done` has `memory`, bytes of one device by kind, and writes the files. `refused` (the topology), `failed` and
    `memory` (too little) have a `message`. All but `refused` have `compile_s`.
    """
    import jax
    from jax.experimental import topologies

    from autoshard.exec.apply.jax_application import Application
    from autoshard.exec.apply.planned_lowering import lower_module
    from autoshard.planning.record.plan_files import load_plan

    try:
        target = topologies.get_topology_desc(job["topology"], job["platform"], **job["options"])
        devices = sorted(target.devices, key=lambda device: device.id) if job["platform"] != "tpu" else target.devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return {"status": "refused", "message": _first_line(error)}
    jax.config.update("jax_enable_x64", True)  # the module may have 64-bit types
    plan = load_plan(directory / "plan.json")
    application = Application(plan, tuple(devices))
    bodies = {int(path.stem.partition("-")[2]): path.read_bytes() for path in directory.glob("call-*.mlirbc")}
    lowered = lower_module(application, (directory / "module.mlirbc").read_bytes(), dict(job["aliases"]), bodies)
    dump = directory / "dump"
    dump.mkdir()
    start = time.perf_counter()
    options: dict[str, Any] = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    try:
        # The text comes from the dump, since `as_text()` fails on some programs with asynchronous ops.
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if _NO_TILES not in str(error):
                raise
            compiled = lowered.compile(compiler_options=options | {"xla_gpu_enable_triton_gemm": False})
    except jax.errors.JaxRuntimeError as error:
        seconds = time.perf_counter() - start
        if "RESOURCE_EXHAUSTED" in str(error):
            return {"status": "memory", "message": str(error), "compile_s": seconds}
        return {"status": "failed", "message": str(error)[:2000], "compile_s": seconds}
    seconds = time.perf_counter() - start
    # The compiler also dumps auxiliary modules (for the sparse cores, for instance); the step's own name has `.jit_`.
    texts = sorted(dump.glob("*after_optimizations.txt"), key=lambda path: (".jit_" not in path.name, path.name))
    if texts:
        live = texts[0].with_name(texts[0].name.removesuffix(".txt") + "-live-range.txt")
        os.replace(texts[0], directory / "program.hlo")
        if live.exists():
            os.replace(live, directory / "program.live")
    else:
        (directory / "program.hlo").write_text(compiled.as_text())
    stats = compiled.memory_analysis()
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "donated": stats.alias_size_in_bytes,
        "peak": getattr(stats, "peak_memory_in_bytes", 0),
        "host": sum(getattr(stats, f"host_{what}_size_in_bytes", 0) for what in ("argument", "temp", "output"))
        - getattr(stats, "host_alias_size_in_bytes", 0),
    }
    return {"status": "done", "memory": {key: int(size) for key, size in memory.items()}, "compile_s": seconds}


def _first_line(error: Exception) -> str:
    """Return an error's text as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
