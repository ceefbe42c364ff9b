"""What a compiler left of a program that was compiled with no device present."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler left: scheduled HLO and memory, or how much it lacked."""

    text: str
    """Scheduled HLO; empty if the program does not fit."""
    memory: dict[str, int]
    """Bytes of one device: arguments, results, temporaries, donated, peak; and in its host's memory, `host`."""
    compile_s: float
    needed_bytes: int | None
    """What the program needed, if it does not fit."""
    available_bytes: int | None
    log: str
    """What the compiler wrote to stderr."""
    live: str = ""
    """The compiler's report of live ranges, its last part the buffers at the peak; empty if it left none."""
    coded: bool = True
    """Whether machine code was written too."""
