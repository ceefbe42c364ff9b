"""A refinement with a slow judge that prints when it has judged: `refine_checks.py`, data in AUTOSHARD_DATA_DIR."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from autoshard.cost import Bill, Judge
from autoshard.exec import refine
from autoshard.exec.learn import refinement
from autoshard.exec.learn.judges import Seen
from autoshard.planning import Plan, plan_bills
from autoshard.program import Program
from tests.planning.programs import program


class MadeUpJudge:
    """Judge that converts bills to seconds by a function of its own, and counts its calls."""

    name: Judge = "measure"

    def __init__(self, seconds: Callable[[Bill], float], wait_s: float = 0.0) -> None:
        self.seconds, self.wait_s = seconds, wait_s
        self.asked: list[str] = []

    def judge(
        self, program: Program, plans: Mapping[str, Plan], progress: Callable[[str], None]
    ) -> Iterator[tuple[str, Seen]]:
        for (name, _), bill in zip(plans.items(), plan_bills(program, list(plans.values())), strict=True):
            time.sleep(self.wait_s)
            self.asked.append(name)
            yield name, Seen(self.seconds(bill), 0.01, "ran")


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    judge = MadeUpJudge(lambda bill: 0.1 + 0.001 * len(bill.charges), wait_s=1.0)
    refinement.judge_of = lambda *_: judge  # pyrefly: ignore[bad-assignment]
    result = refine(
        program("mlp"), topology="cpu:8", mesh="data=4,model=2", plans=4, rounds=1,
        progress=lambda line: print(line, flush=True),
    )  # fmt: skip
    print("done", len(judge.asked), len(result.judged), flush=True)


if __name__ == "__main__":
    sys.exit(main())
