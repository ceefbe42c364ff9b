"""What only a process that runs one command and then ends may do to be fast."""

import atexit
import gc

from autoshard.base.crew import Crew, helpers_here
from autoshard.base.process import collect_seldom


_own = False


def settle() -> None:
    """Say that this process is the command's own: collect garbage seldom, and none at the end."""
    global _own
    _own = True
    collect_seldom()
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


def start_helpers() -> Crew:
    """A helper process for each further core, which imports what it needs while this one still traces."""
    return Crew(helpers_here(), "autoshard.plan._warm:ready") if _own else Crew()
