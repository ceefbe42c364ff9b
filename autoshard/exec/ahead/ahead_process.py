"""Compilation without devices, by libtpu or the GPU compiler, in a separate process with a time limit."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoshard import mlir
from autoshard.base.on_thread import OnThread
from autoshard.base.processes import scratch_folder
from autoshard.base.worker import Job, Worker, WorkerEnded
from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.exec.ahead.ahead_worker import compile_files
from autoshard.exec.ahead.compile_targets import Compiled, Target, gpu_target, placed, read_placed
from autoshard.exec.apply.calls_on_shards import lower_for_compiler
from autoshard.exec.apply.planned_lowering import donated_aliases
from autoshard.planning import Plan
from autoshard.planning.record.plan_files import plan_to_json
from autoshard.program import Program


_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_MIN_LOG_LEVEL": "1",
}
"""Environment variables with which libtpu starts on a machine that is no TPU host; JAX itself stays on the CPU."""

_LOCK = Path("/tmp/libtpu_lockfile")
"""Lock file that libtpu creates."""

_GIB = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""Unit in libtpu's messages -> bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompileJob:
    """Picklable job that compiles one plan, here or on another machine."""

    target: Target
    """Compiler, and the topology as the compiler names it."""
    files: dict[str, bytes]
    """Content of the files that the compiler's process reads, by name."""
    flags: tuple[str, ...]
    """Compiler flags for which the plan was made."""
    argument_bytes: int
    """Bytes of the arguments on one device."""
    time_limit: float
    """Most seconds that the compiler may take."""
    quick: bool
    """True if the compiler is ended before it writes machine code."""


def compile_without_devices(program: Program, plan: Plan, time_limit: float, quick: bool = False) -> Compiled:
    """Compile the program under the plan for its topology: by libtpu, or by JAX's CUDA plugin for GPUs.

    - `time_limit`: most seconds that the compiler may take.
    - `quick`: end libtpu when every value has its place in memory, before it writes machine code. GPUs ignore it.

    A program that needs too much memory is no error: the result then has an empty text and the bytes needed.

    Raises `UserError` if no compiler is installed for the topology. It is also raised if the compiler refuses the
    topology, fails, dies or takes too long. In every case no process and no lock is left behind.
    """
    return run_job(compile_job(program, plan, time_limit, quick))


def compile_job(program: Program, plan: Plan, time_limit: float, quick: bool) -> CompileJob:
    """Return the job that compiles a plan; `quick` is dropped for GPUs.

    Raises `UserError` if no compiler is installed for the topology.
    """
    target = compiler_target(Topology.parse(plan.topology))
    aliases = sorted(donated_aliases(program, plan).items())
    job = {"platform": target.platform, "topology": target.name, "options": target.options, "aliases": aliases}
    files = {
        "plan.json": plan_to_json(plan).encode(),
        "module.mlirbc": program.module,
        "job.json": json.dumps(job).encode(),
    }
    for number, body in lower_for_compiler(program, plan, target.platform).items():
        files[f"call-{number}.mlirbc"] = body
    quick = quick and target.platform == "tpu"
    return CompileJob(target, files, plan.flags, _argument_bytes(program, plan), time_limit, quick)


def run_job(job: CompileJob) -> Compiled:
    """Compile in a separate process, which is gone afterwards. Raises `UserError` as `compile_without_devices` does."""
    with scratch_folder("compile") as directory, _no_new_lock():
        for name, data in job.files.items():
            (directory / name).write_bytes(data)
        began = time.monotonic()
        result, log = _run(job, directory)
        if result is None and (stem := placed(directory)):
            return read_placed(directory, stem, time.monotonic() - began, log)
        return _read_result(directory, result or {}, log, job.target, job.argument_bytes)


def try_job(job: CompileJob) -> Compiled | UserError:
    """Run a job in an executor's worker; return its `UserError` instead of raising it, for other plans' sake."""
    try:
        return run_job(job)
    except UserError as error:
        return UserError(str(error))


def compiler_target(topology: Topology) -> Target:
    """Return the compiler of a topology: libtpu for TPUs, JAX's CUDA plugin for GPUs.

    Raises `UserError` if none exists, as for CPUs, or if it is not installed.
    """
    if topology.traits.compiles_ahead:
        if importlib.util.find_spec("libtpu") is None:
            raise UserError("compiling for TPU needs libtpu, which is not installed: pip install 'autoshard[tpu]'.")
        name, options = libtpu_topology(topology)
        return Target("tpu", "TPU", topology.name, name, options, _ENVIRONMENT)
    if topology.traits.described:
        return gpu_target(topology)
    raise UserError(
        f"the plan is for {topology.name}; only TPU and GPU topologies can be compiled for without the devices: "
        "use `autoshard measure` where the devices are."
    )


def _argument_bytes(program: Program, plan: Plan) -> int:
    """Return the bytes of the arguments on one device, unpadded, except arguments in its host's memory."""
    import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with numpy
    import numpy as np

    total = 0
    types, _ = mlir.main_types(mlir.parse_module(program.module))
    for argument, (shape, dtype) in zip(program.arguments, types, strict=True):
        if argument.name in plan.host:
            continue
        spec = plan.arguments[argument.name].of_rank(len(shape))
        total += math.prod(spec.local_shape(shape, plan.mesh)) * np.dtype(dtype).itemsize
    return total


def libtpu_topology(topology: Topology) -> tuple[str, dict[str, Any]]:
    """Return the name and the keyword options with which `get_topology_desc` describes a TPU topology to libtpu."""
    options: dict[str, Any] = {}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.chip.compiler_config:
        options["chip_config_name"] = topology.chip.compiler_config
    if topology.twisted:
        options["wrap"] = topology.wrap
    shape = "x".join(map(str, topology.shape)) + ("_twisted" if topology.twisted else "")
    return f"{topology.chip.name}:{shape}", options


@contextlib.contextmanager
def _no_new_lock() -> Iterator[None]:
    """Remove libtpu's empty lock file after the `with` block, unless it existed before."""
    existed = _LOCK.exists()
    try:
        yield
    finally:
        if not existed:
            with contextlib.suppress(OSError):
                _LOCK.unlink(missing_ok=True)


def _run(job: CompileJob, directory: Path) -> tuple[dict[str, Any] | None, str]:
    """Compile the files of a folder in another process, which is gone afterwards; return its result and its stderr.

    The result is None if the dumps of a quick job are in the folder instead. Raises `UserError` if the process dies or
    takes too long.
    """
    until = time.monotonic() + job.time_limit
    target, path = job.target, directory / "stderr.txt"

    def enough() -> bool:
        """Return True once the time is over, or a quick job has what it needs."""
        return time.monotonic() > until or (job.quick and placed(directory) is not None)

    with open(path, "wb") as stderr:
        worker = Worker(compile_files.__module__, environment=_environment(job, directory), stderr=stderr, session=True)
        try:
            run = OnThread(lambda: worker.call(Job(target.name, compile_files, (str(directory),)))[0])
            result = run.result(enough)
        except WorkerEnded as error:
            how, reason = error.how, _last_line(path.read_text(errors="replace"))
            raise UserError(
                f"the {target.noun} compiler {how} on {target.topology}; it may not support this shape ({reason})."
            ) from None
        finally:
            worker.end()
    if result is None and not (job.quick and placed(directory)):
        quick = "" if job.quick else "--quick writes no machine code on TPUs and takes seconds, or "
        raise UserError(
            f"the {target.noun} compiler did not finish {target.topology} within {job.time_limit:g} s: "
            f"{quick}give it longer with --time-limit."
        )
    return result, path.read_text(errors="replace")


def _environment(job: CompileJob, directory: Path) -> dict[str, str]:
    """Return the environment variables of the compiler's process: those of this one without `XLA_FLAGS`.

    A plan's flags precede those of `LIBTPU_INIT_ARGS`. Temporary files go to `directory`.
    """
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {**job.target.environment, "TPU_LOG_DIR": str(directory), "TMPDIR": str(directory)}
    if job.flags:
        environment["LIBTPU_INIT_ARGS"] = " ".join([*job.flags, os.environ.get("LIBTPU_INIT_ARGS", "")]).strip()
    return environment


def _read_result(directory: Path, result: dict[str, Any], log: str, target: Target, argument_bytes: int) -> Compiled:
    """Return the compiled program from the result of the compiler's process and the files that it wrote.

    Raises `UserError` for each kind of failure except lack of memory, which has an empty text and the bytes needed.

    - `result`: the result of `compile_files`.
    - `log`: stderr of the process.
    - `argument_bytes`: bytes of the arguments on one device, which some messages leave out.
    """
    noun, topology = target.noun, target.topology
    status, message = result["status"], result.get("message", "")
    if status == "refused":
        raise UserError(f"the {noun} compiler refuses the topology {topology}: {message}")
    if status == "failed":
        raise UserError(f"the {noun} compiler failed on {topology}: {' '.join(message.split())[:300]}")
    if status == "memory":
        needed, available = parse_out_of_memory(message)
        if needed is not None and "HLO temporaries" in message:
            needed += argument_bytes  # this message counts allocations, but not arguments
        return Compiled("", {}, result["compile_s"], needed, available, log)
    text = (directory / "program.hlo").read_text()
    live = directory / "program.live"
    ranges = live.read_text() if live.exists() else ""
    return Compiled(text, result["memory"], result["compile_s"], None, None, log, ranges)


def _last_line(log: str) -> str:
    """Return the last line of a log that looks like an error, else its last line, cut to 200 characters."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|fail|check|exception|F\d{4} ", line, re.IGNORECASE)]
    return (errors or lines or ["it said nothing"])[-1][:200]


def parse_out_of_memory(message: str) -> tuple[int | None, int | None]:
    """Return the bytes needed and available from libtpu's out-of-memory message; (None, None) if it gives none."""
    pairs = (
        r"\(([\d.]+)([BKMGT])\)\s*exceeds\s*available\s*HBM\s*\(([\d.]+)([BKMGT])\)",
        r"Used ([\d.]+)([BKMGT]) of ([\d.]+)([BKMGT]) hbm",
    )
    for pattern in pairs:
        sizes = re.search(pattern, message)
        if sizes:
            return (
                round(float(sizes[1]) * _GIB[sizes[2]]),
                round(float(sizes[3]) * _GIB[sizes[4]]),
            )
    return None, None
