"""Environments in which a command must work or name what is missing: no home, full disks, other users, little memory.

Each environment is set up inside the command's own process, before it imports the package. A step that this system
forbids, such as a mount, ends the process with `NOT_HERE`.
"""

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
NOT_HERE = 77
PLAN = "plan step.py --topology cpu:8@2 --mesh data=4,model=2 --quiet --out new.json"

MOUNTING = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, where, kind=None, flags=0, options=None):
    texts = [None if text is None else os.fsencode(text) for text in (source, where, kind)]
    if libc.mount(*texts, flags, options):
        raise SystemExit({NOT_HERE})
def empty(where, options=b"size=64k", read_only=False):
    mount("none", where, "tmpfs", read_only, options)
if libc.unshare(0x20000):  # a name space of its own for mounts
    raise SystemExit({NOT_HERE})
mount("none", "/", None, 0x44000)
"""
ANOTHER_USER = (
    MOUNTING
    + f"""
if os.geteuid() != 0:
    raise SystemExit({NOT_HERE})
base, top = sys.base_prefix, os.path.join("/", *sys.base_prefix.split("/")[1:2])
if os.stat(top).st_mode & 5 != 5:  # Python itself lies in the home of root
    os.makedirs(aside := os.environ["TMPDIR"] + "/python")
    mount(base, aside, None, 0x1000)
    empty(top, b"mode=755")
    os.makedirs(base)
    mount(aside, base, None, 0x1000)
for name in (".", os.environ["HOME"], os.environ["TMPDIR"]):
    os.chown(name, 65534, 65534)
os.setgroups([]), os.setgid(65534), os.setuid(65534)
"""
)
WORKS = {
    "no home": "import os, pwd\ndel os.environ['HOME']\npwd.getpwuid = {}.__getitem__",
    "a home that is not there": "import os; os.environ['HOME'] = '/nowhere/home'",
    "a read-only home": MOUNTING + "empty(os.environ['HOME'], read_only=True)",
    "a full disk below the home": MOUNTING + "empty(os.environ['HOME'], b'size=4k,nr_inodes=1')",
    "no /dev/shm": MOUNTING + "empty('/dev/shm', read_only=True)",
    "a full folder for temporary files": MOUNTING + "empty(os.environ['TMPDIR'], b'size=4k,nr_inodes=1')",
    "another user": ANOTHER_USER,
    "another locale": "import os; os.environ.update(LC_ALL='tr_TR.UTF-8', LANG='tr_TR.UTF-8', TZ='Asia/Kathmandu')",
    "the locale C": "import os; os.environ.update(LC_ALL='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0')",
    "few open files": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "no further process": """
import errno, subprocess
class Popen(subprocess.Popen):
    def __init__(self, *_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    def __del__(self, *_, **__):
        pass
subprocess.Popen = Popen
""",
}
"""Code that sets up each environment in which the plan must be the same."""
REFUSES = {
    "a full disk": MOUNTING
    + """
text, here = open("step.py").read(), os.getcwd()
empty(here, b"size=8k")
os.chdir(here)
with open("step.py", "w") as file:
    file.write(text)
with open("filler", "wb", 0) as file:
    file.write(bytes(4096))
""",
    "a working directory that is gone": "import os, tempfile; os.chdir(gone := tempfile.mkdtemp()); os.rmdir(gone)",
    **{
        f"{mebibytes} MiB of addresses": f"import resource as r; r.setrlimit(r.RLIMIT_AS, ({mebibytes} << 20,) * 2)"
        for mebibytes in (400, 700, 1024, 2048, 3072, 4096)
    },
}
"""Code that sets up each environment in which the command must refuse in one sentence and write nothing."""


def run(place: str, folder: Path, line: str = PLAN, made: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, in the environment of `made`, `WORKS` or `REFUSES`."""
    for name in ("home", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AUTOSHARD_", "XDG_"))}
    environment |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    code = made or {**WORKS, **REFUSES}[place]
    code += "\nfrom autoshard.cli import main\nraise SystemExit(main())"
    command = [sys.executable, "-c", code, *line.split()]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def seen(place: str, folder: Path, wanted: bytes) -> str:
    """Return the fault of a plan made in an environment: empty for none, `not here` if there is no such environment."""
    done = run(place, folder)
    if done.returncode == NOT_HERE:
        return "not here"
    out = folder / "new.json"
    lines = [line for line in done.stderr.splitlines() if line]
    if "Traceback" in done.stderr:
        return f"a traceback: {lines[-1]}"
    if place in WORKS:
        if done.returncode:
            return f"it ended with {done.returncode}: {lines[-1:]}"
        return "" if out.read_bytes() == wanted else "another plan"
    # In addition to the sentence, there may be a warning of a cache that cannot be written.
    if done.returncode != 2 or not lines or not all(line.startswith("autoshard: ") for line in lines):
        return f"it ended with {done.returncode}: {lines[-1:]}"
    return "something was written" if out.exists() else ""
