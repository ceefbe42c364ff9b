"""Compiling with no device present: libtpu, or the GPU compiler, in a process of its own, with a time limit."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autoshard import mlir
from autoshard.base.processes import python_command, scratch_folder
from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.exec.ahead.compile_targets import Compiled, Target, gpu_target, placed, read_placed
from autoshard.exec.apply.calls_on_shards import lower_for_compiler
from autoshard.exec.apply.jax_application import donated_aliases
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
"""What libtpu needs to start on a machine that is no TPU host; JAX itself stays on the CPU."""

_LOCK = Path("/tmp/libtpu_lockfile")

RESULT = "result.json"
_POLL_S = 0.25

_GIB = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, slots=True)
class CompileJob:
    """One plan to be compiled, here or on another machine. It can be pickled."""

    target: Target
    files: dict[str, bytes]
    """What the compiler's process reads, by file name."""
    flags: tuple[str, ...]
    """Compiler flags that the plan was made for."""
    argument_bytes: int
    """Bytes of the arguments on one device."""
    time_limit: float
    """Seconds that the compiler may take."""
    quick: bool
    """Whether it is ended before machine code is written, where it can be."""


def compile_without_devices(program: Program, plan: Plan, time_limit: float, quick: bool = False) -> Compiled:
    """Apply the plan to the program's module and compile it for the plan's topology: by libtpu, or for GPUs by the
    compiler in JAX's CUDA plugin from a description of the chip.

    With `quick` libtpu is ended when every value has its place in memory, before it writes machine code.

    Raises `UserError` if the compiler is not installed, there is none for the topology, it refuses it, fails, dies or
    takes longer than `time_limit` seconds; no process and no lock is left behind in any case.
    """
    return run_job(compile_job(program, plan, time_limit, quick))


def compile_job(program: Program, plan: Plan, time_limit: float, quick: bool) -> CompileJob:
    """What there is to compile. Raises `UserError` if nothing compiles for the topology, or not here."""
    target = _target(Topology.parse(plan.topology))
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
    """Compile in a process of its own, which is gone afterwards. Raises `UserError` as `compile_without_devices`."""
    with scratch_folder("compile") as directory, _no_new_lock():
        for name, data in job.files.items():
            (directory / name).write_bytes(data)
        began = time.monotonic()
        code, log = _run(directory, job.time_limit, job.target, job.flags, until=placed if job.quick else None)
        stem = placed(directory) if job.quick and not (directory / RESULT).exists() else None
        if stem is not None:
            return read_placed(directory, stem, job.argument_bytes, time.monotonic() - began, log)
        return _read_result(directory, code, log, job.target, job.argument_bytes)


def try_job(job: CompileJob) -> Compiled | UserError:
    """The same, for a worker of an executor: what the compiler has against one plan does not end the others."""
    try:
        return run_job(job)
    except UserError as error:
        return UserError(str(error))


def _target(topology: Topology) -> Target:
    """What compiles for a topology. Raises `UserError` where nothing does, or it is not installed."""
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
    """Of one device: what waits in its host's memory is not among them."""
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
    """Name and options of `get_topology_desc` for a topology."""
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
    """libtpu leaves an empty lock file; take ours away, never another's."""
    had = _LOCK.exists()
    try:
        yield
    finally:
        if not had:
            with contextlib.suppress(OSError):
                _LOCK.unlink(missing_ok=True)


def _run(
    directory: Path,
    time_limit: float,
    target: Target,
    flags: Sequence[str] = (),
    until: Callable[[Path], object] | None = None,
) -> tuple[int, str]:
    """`flags`: those that the plan was made for; they go before what the environment says. The process is ended when
    `until` finds something in the directory."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {**target.environment, "TPU_LOG_DIR": str(directory), "TMPDIR": str(directory)}
    if flags:
        environment["LIBTPU_INIT_ARGS"] = " ".join([*flags, os.environ.get("LIBTPU_INIT_ARGS", "")]).strip()
    log = directory / "stderr.txt"
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            python_command("autoshard.exec.ahead.ahead_worker", str(directory)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        try:
            code = _wait(process, time_limit, lambda: until is not None and until(directory) is not None)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"the {target.noun} compiler did not finish {target.topology} within {time_limit:g} s: "
                "give it longer with --time-limit."
            ) from None
        finally:
            _end(process)
    return code, log.read_text(errors="replace")


def _wait(process: "subprocess.Popen[bytes]", time_limit: float, enough: Callable[[], bool]) -> int:
    """The process's exit code, or 0 if there is enough of it before. Raises `TimeoutExpired`."""
    end = time.monotonic() + time_limit
    while not enough():
        left = end - time.monotonic()
        try:
            return process.wait(timeout=min(_POLL_S, max(left, 0.0)))
        except subprocess.TimeoutExpired:
            if left <= _POLL_S:
                raise
    return 0


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the process and everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)


def _read_result(directory: Path, code: int, log: str, target: Target, argument_bytes: int) -> Compiled:
    noun, topology = target.noun, target.topology
    path = directory / RESULT
    if not path.exists():
        reason = _last_line(log)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise UserError(f"the {noun} compiler {how} on {topology}; it may not support this shape ({reason}).")
    result = json.loads(path.read_text())
    status, message = result["status"], result.get("message", "")
    if status == "refused":
        raise UserError(f"the {noun} compiler refuses the topology {topology}: {message}")
    if status == "user":
        raise UserError(message)
    if status == "failed":
        raise UserError(f"the {noun} compiler failed on {topology}: {' '.join(message.split())[:300]}")
    if status == "memory":
        needed, available = parse_out_of_memory(message)
        if needed is not None and "HLO temporaries" in message:
            needed += argument_bytes  # that message counts what the program allocates, not what it is given
        return Compiled("", {}, result["compile_s"], needed, available, log)
    text = (directory / "program.hlo").read_text()
    live = directory / "program.live"
    ranges = live.read_text() if live.exists() else ""
    return Compiled(text, result["memory"], result["compile_s"], None, None, log, ranges)


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"error|fail|check|exception|F\d{4} ", line, re.IGNORECASE)]
    return (told or lines or ["it said nothing"])[-1][:200]


def parse_out_of_memory(message: str) -> tuple[int | None, int | None]:
    """Bytes needed and available, from libtpu's out-of-memory message; None where it does not say."""
    pairs = (
        r"\(([\d.]+)([BKMGT])\)\s*exceeds\s*available\s*HBM\s*\(([\d.]+)([BKMGT])\)",
        r"Used ([\d.]+)([BKMGT]) of ([\d.]+)([BKMGT]) hbm",
    )
    for pattern in pairs:
        found = re.search(pattern, message)
        if found:
            return (
                round(float(found[1]) * _GIB[found[2]]),
                round(float(found[3]) * _GIB[found[4]]),
            )
    return None, None
