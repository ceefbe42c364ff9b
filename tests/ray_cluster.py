"""A Ray cluster of local nodes, in a process of its own: `python -m tests.ray_cluster` prints its address.

A line on its stdin kills the newest node without notice (`kill`) or adds one (`add`), and is answered by a line. The
cluster ends with its stdin. Nodes have one CPU each.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).parents[1]


class LocalCluster:
    """The cluster's process, as tests use it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.address = self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self._answer()


@contextlib.contextmanager
def local_cluster(nodes: int = 2) -> Iterator[LocalCluster]:
    """Start a cluster of so many nodes, with its own `RAY_TMPDIR` while it runs."""
    had = os.environ.get("RAY_TMPDIR")
    # paths of sockets must be short
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        command = [sys.executable, "-m", "tests.ray_cluster", str(nodes)]
        try:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
            ) as process:
                yield LocalCluster(process)
        finally:
            os.environ.pop("RAY_TMPDIR")
            if had is not None:
                os.environ["RAY_TMPDIR"] = had


def main(nodes: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    def say(line: str) -> None:
        print(line, file=answers, flush=True)

    one = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=one)
    added = [cluster.add_node(**one) for _ in range(nodes - 1)]
    say(cluster.address)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(added.pop(), allow_graceful=False)
        else:
            added.append(cluster.add_node(**one))
        say("done")
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
