"""A profile of what the devices do, by JAX's own profiler, as one file."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

from autoshard.base.files import write_whole
from autoshard.errors import UserError


@contextlib.contextmanager
def profiled(path: pathlib.Path) -> Iterator[None]:
    """Records what happens inside, and writes it to `path` as a gzipped trace in Chrome's format.

    Python's own calls are left out. Raises: UserError if the profiler wrote nothing.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield
        traces = sorted(pathlib.Path(folder).rglob("*.trace.json.gz"))
        if not traces:
            raise UserError("JAX's profiler wrote no trace here; measure without --profile.")
        write_whole(path, traces[0].read_bytes())
