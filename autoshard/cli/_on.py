"""`--on`: candidates as tasks of a Ray cluster."""

import argparse
import contextlib
import re
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from autoshard.base.ray_pool import RayPool
    from autoshard.report import ProgressLine

WORKER = "autoshard.cli._process:settle_worker"
"""What every process that plans for a command calls first."""


def add_on(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--on",
        type=ray_address,
        metavar="RAY",
        help=f"{what} as tasks of a Ray cluster: ray (the one that is here, else one of this machine alone), "
        "HOST:PORT, or ray://HOST:PORT from elsewhere",
    )


def ray_address(text: str) -> str:
    if text != "ray" and not re.fullmatch(r"(ray://)?([^\s/:]+|\[[^\s/]+\]):\d{1,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not ray, HOST:PORT or ray://HOST:PORT")
    return text


def ray_of(arguments: argparse.Namespace) -> "contextlib.AbstractContextManager[RayPool | None]":
    """What `--on` names, to which a connection has begun; None without the flag. Raises `UserError` without Ray."""
    if arguments.on is None:
        return contextlib.nullcontext()
    from autoshard.base.ray_pool import RayPool

    return RayPool(arguments.on, getattr(arguments, "jobs", None), WORKER)


def connect(pool: "RayPool | None", progress: "ProgressLine") -> None:
    """Wait for the connection, before anything is done in vain. Raises `UserError` if it cannot be had."""
    if pool is not None:
        progress("Connecting to Ray")
        pool.connect()
