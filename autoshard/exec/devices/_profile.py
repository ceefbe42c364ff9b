"""A profile of what the devices do, by JAX's own profiler, as one file."""

import contextlib
import pathlib
from collections.abc import Iterator

from autoshard.base.files import write_whole
from autoshard.base.process import scratch_folder
from autoshard.errors import UserError


@contextlib.contextmanager
def profiled(path: pathlib.Path) -> Iterator[None]:
    """Records what happens inside, and writes it to `path` as a gzipped trace in Chrome's format.

    Python's own calls are left out. Raises: UserError if the profiler wrote nothing.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with scratch_folder("profile") as folder:
        with jax.profiler.trace(str(folder), profiler_options=options):
            yield
        traces = sorted(folder.rglob("*.trace.json.gz"))
        if not traces:
            raise UserError("JAX's profiler wrote no trace here; measure without --profile.")
        write_whole(path, traces[0].read_bytes())
