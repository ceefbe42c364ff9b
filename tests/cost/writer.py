"""A process that adds rows to a database one by one and prints each stored one: `writer.py FOLDER NAME COUNT`."""

import sys
from pathlib import Path

from autoshard.cost import Database
from tests.cost.observed import bill, observation


def main(folder: str, name: str, count: str) -> None:
    database = Database(Path(folder))
    for number in range(int(count)):
        one = observation(bill(matmul=number + 1, traffic=1e6), 0.1 + number, f"{name}-{number}")
        if database.add([one]):
            print(one.id, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
