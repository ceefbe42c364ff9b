"""Scripts of the checkout as modules: examples and experiments that tests run."""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType


@functools.cache
def load_script(path: str) -> ModuleType:
    """Load the script at a path from the checkout's root, such as `examples/pipeline.py`."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_script", Path(__file__).parents[1] / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
