"""CPU devices that stand in for a machine's accelerators."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from autoshard.errors import UserError
from autoshard.exec import ensure_devices
from autoshard.program import check_backend


THREADS = """
from pathlib import Path
from autoshard.exec import ensure_devices

ensure_devices(8)
import jax

print(len(jax.devices()))
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print(sum(name == "tf_XLAEigen" for name in names))
"""


def threads(**variables: str) -> int:
    env = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PJRT_NPROC", "NPROC")}
    env |= {"JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, check=True)
    devices, count = map(int, done.stdout.split())
    assert devices == 8
    return count


def test_a_kernel_that_waits_in_every_device_leaves_a_thread_that_works() -> None:
    assert threads() >= 9


def test_what_the_user_says_of_threads_stands() -> None:
    assert threads(PJRT_NPROC="12") == 12


PROGRAM = """
import jax
import jax.numpy as jnp

def step(w, x):
    return jnp.tanh(x @ w)

def program():
    return step, ({values},) * 2
"""

MISSING = (
    "JAX_PLATFORMS=metal asks for devices that JAX cannot start here: leave it unset, or set it to `cpu`, which is "
    "enough to plan."
)


@pytest.mark.parametrize(
    "values", ["jax.ShapeDtypeStruct((8, 8), jnp.float32)", pytest.param("jnp.ones((8, 8))", marks=pytest.mark.full)]
)
def test_a_platform_that_is_not_here_is_named(values: str, tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(PROGRAM.format(values=values))
    env = os.environ | {"JAX_PLATFORMS": "metal"}
    command = [sys.executable, "-m", "autoshard", "plan", "step.py", "--topology", "cpu:8", "--mesh", "data=8"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == f"autoshard: {MISSING}"


def test_an_assertion_without_a_word_in_jax_names_the_platform_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as JAX does on a host without CUDA whose CUDA plugin is installed."""

    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", fail)
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "metal")
    try:
        with pytest.raises(UserError) as caught:
            ensure_devices(8)
    finally:
        jax.config.update("jax_platforms", before)
    assert str(caught.value) == MISSING


def test_an_assertion_of_the_users_own_is_not_the_platforms() -> None:
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "cpu")
    try:
        check_backend(AssertionError())
    finally:
        jax.config.update("jax_platforms", before)
