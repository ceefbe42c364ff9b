"""A Ray cluster as an executor: outcomes, nodes that die, addresses that do not answer, and no leftovers."""

import concurrent.futures
import importlib.util
import os
import pickle
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoshard
from autoshard.base import ray_pool
from autoshard.base.ray_node import NAMES, NodeSetting, run_call, setting_here
from autoshard.base.ray_pool import RayPool
from autoshard.base.worker_pool import as_ended
from autoshard.cost import Topology
from autoshard.errors import UserError
from tests.base.test_pool import die, fail, nap
from tests.ray_cluster import LocalCluster, local_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster() as cluster:
        yield cluster


def place(named: str) -> tuple[str, str | None, str]:
    return os.getcwd(), os.environ.get(named), os.environ.get(NAMES[0], "none")


def mistake() -> None:
    raise UserError("that is not there")


@pytest.mark.heavy
@pytest.mark.full
def test_a_node_that_is_killed_loses_nothing(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Share one cluster among all checks that need only one: it needs seconds to start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOSHARD_TESTED", "yes")
    monkeypatch.delenv(NAMES[0], raising=False)
    source = tmp_path / "step.py"
    source.write_text(PROGRAM)
    alone = autoshard.sweep("step.py", topologies=["cpu:2", "cpu:4"], path=tmp_path / "alone")
    with RayPool(cluster.address) as pool:
        assert pool.submit(place, "AUTOSHARD_TESTED").result(60) == (str(tmp_path), "yes", "none")
        with pytest.raises(RuntimeError, match="ValueError: no luck"):
            pool.submit(fail).result(60)
        with pytest.raises(UserError, match="that is not there"):
            pool.submit(mistake).result(60)
        with pytest.raises(concurrent.futures.BrokenExecutor, match="died"):
            pool.submit(die).result(60)
        workers, killed = {}, ""
        for number, worker in as_ended(pool, nap, [0.5] * 8):
            workers[number] = worker
            if not killed and len(set(workers.values())) == 2:  # both nodes are working
                killed = cluster.tell("kill")
        assert killed == "done" and sorted(workers) == list(range(8))
        far = autoshard.sweep("step.py", topologies=["cpu:2", "cpu:4"], path=tmp_path / "far", executor=pool)
    assert far == alone
    files = {path.name for path in (tmp_path / "alone").iterdir()}
    assert files == {"sweep.json", "cpu-2.plan.json", "cpu-4.plan.json"}
    assert all((tmp_path / "far" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes() for name in files)
    with pytest.raises(RuntimeError, match="has ended"):
        pool.submit(nap, 0.0)


PROGRAM = """
import jax, jax.numpy as jnp

def program():
    return lambda params, x: jnp.tanh(x @ params), tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((16, 8), (8, 16)))
"""


@pytest.mark.full
def test_at_most_so_many_at_a_time_for_any_size(cluster: LocalCluster) -> None:
    with RayPool(cluster.address, most=1) as pool:
        began = time.monotonic()
        concurrent.futures.wait([pool.submit(nap, 0.5) for _ in range(4)])
        assert time.monotonic() - began >= 2.0
        large = [bytes([number]) * (1 << 20) for number in range(8)]  # more than pipes buffer, in both directions
        assert [each.result(60) for each in [pool.submit(bytes.upper, data) for data in large]] == large


@pytest.mark.heavy
def test_an_address_where_nothing_listens_is_named_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # the port is reserved, and nothing listens on it
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        pool = RayPool(address)
        with pytest.raises(UserError) as caught:
            pool.submit(nap, 0.0)
    assert str(caught.value) == (
        f"--on {address}: no Ray can be reached at {address} (Connection refused); "
        "on a machine that is no node of that cluster give ray://HOST:10001."
    )
    assert not pool._driver.alive


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_what_listens_and_is_no_ray_is_named_as_well(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANSWER_S", "CLIENT_S"):
        monkeypatch.setattr(ray_pool, name, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = form.format(f"127.0.0.1:{silent.getsockname()[1]}")
        pool = RayPool(address)
        with pytest.raises(UserError) as caught:
            pool.connect()
    assert str(caught.value).startswith(f"--on {address}: no Ray can be reached at {address} (no answer within 1 s)")
    assert not pool._driver.alive


def test_ray_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        RayPool()
    assert str(caught.value) == "--on ray needs Ray, which is not installed: pip install 'autoshard[ray]'."


def test_what_ray_alone_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_pool._found("ray") == ("", "", "own")
    (noted := tmp_path / "ray" / "ray_current_cluster").parent.mkdir()
    noted.write_text("10.0.0.1:6379")
    assert ray_pool._found("ray") == ("10.0.0.1:6379", str(noted), "noted")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert ray_pool._found("ray") == ("10.0.0.2:6379", "RAY_ADDRESS", "given")
    assert ray_pool._found("10.0.0.3:6379") == ("10.0.0.3:6379", "", "given")


def answered(setting: NodeSetting, call, *arguments):
    return pickle.loads(run_call(setting, pickle.dumps((call, arguments))))


def test_a_node_works_as_the_machine_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.base.ray_node._settled", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_TESTED", "here")
    setting = setting_here()
    monkeypatch.setenv("XLA_TESTED", "there")
    monkeypatch.setenv("AUTOSHARD_TESTED", "there alone")
    monkeypatch.chdir("/")
    assert answered(setting, place, "XLA_TESTED")[1][:2] == (str(tmp_path), "here")
    assert answered(setting, place, "AUTOSHARD_TESTED")[1][1] is None
    assert answered(setting, fail) == (False, "ValueError: no luck")
    done, error = answered(setting, mistake)
    assert not done and isinstance(error, UserError)


def test_a_node_with_other_packages_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.base.ray_node._settled", None)
    setting = setting_here()
    other = NodeSetting(setting.environment, setting.folder, {**setting.packages, "jax": "0.0.1"}, None)
    done, error = answered(other, nap, 0.0)
    assert not done and isinstance(error, UserError)
    assert "has jax" in str(error) and str(error).endswith("and this machine has jax 0.0.1: install the same there.")
    assert answered(setting, Topology.parse, "v5e:2x2")[0]
