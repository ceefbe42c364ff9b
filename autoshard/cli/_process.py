"""What only a process that runs one command and then ends may do to be fast."""

import atexit
import gc


_own = False


def settle() -> None:
    """Say that this process is the command's own: collect garbage seldom, and none at the end.

    Imports and graphs of ops live until the end, so looking through them again and again finds nothing: that was a
    quarter of the CPU time of planning a model.
    """
    global _own
    _own = True
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)  # registered first, so it runs last


def settle_imports() -> None:
    """Import no more than the command needs, in a process of its own. Apart, since it is slow itself."""
    if _own:
        from autoshard.program import import_lean

        import_lean()


def settle_worker() -> None:
    """Both, for a process that a command starts."""
    settle()
    settle_imports()
