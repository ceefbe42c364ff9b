"""Code that fails within torch's checkpoint while it is traced, and the hooks that the checkpoint leaves."""

import contextlib
import traceback
from collections.abc import Iterator


@contextlib.contextmanager
def without_stale_hooks() -> Iterator[None]:
    """While inside, code may raise within a checkpoint; afterwards its hooks for saved tensors are gone.

    torch installs them in a generator, which removes them once no frame of a traceback refers to it. Until then they
    take the tensors of whatever runs in eager torch.
    """
    from torch._C import _autograd

    before = _autograd._top_saved_tensors_default_hooks(True)
    try:
        yield
    except BaseException as error:
        raised: BaseException | None = error
        while raised is not None and _autograd._top_saved_tensors_default_hooks(True) != before:
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__cause__ or raised.__context__
        raise
