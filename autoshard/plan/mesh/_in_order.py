"""Trials of meshes in whatever order they are done, taken in the order of the meshes: as if done one by one."""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence

from autoshard.base.helper import Job
from autoshard.cost import Mesh
from autoshard.plan.mesh._trial import Rival, Trial, Trials


class _Step(enum.IntEnum):
    """How far a job goes with a mesh, by what is done first."""

    WHOLE = 0
    """A trial whose rival is known."""
    BOUND = 1
    """Prices and a bound, which may be all that a trial takes."""
    PRICES = 2
    """What does not depend on a rival, while none is known."""
    GUESSED = 3
    """A trial that takes solving, against a rival that is only guessed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    """The mesh of that number against what another one came to."""

    number: int
    rival: "_Key | None"


class InOrder:
    """The work of trying every mesh against the best before it.

    Which mesh is the best before another is only known once all before it are done. Until then it is guessed that
    those not done are not better; what was held against a wrong guess is done again.
    """

    def __init__(
        self,
        trials: Trials,
        meshes: Sequence[Mesh],
        accept: Callable[[Trial], None],
        ahead: bool = True,
        first: Rival | None = None,
    ) -> None:
        """`first` is what the first mesh is held against, if there is anything."""
        self.first = first
        self.trials, self.meshes, self.accept, self.ahead = trials, meshes, accept, ahead
        self.next = 0
        """Number of the mesh to be taken next."""
        self.rival: _Key | None = None
        """The best before it."""
        self.rivals: dict[_Key, Rival] = {}
        self.done: dict[_Key, Trial] = {}
        self.undecided: set[_Key] = set()
        """Bounded, and to be solved."""
        self.begun: set[tuple[_Key, _Step]] = set()
        self.priced_at: dict[int, int] = {}
        """Mesh -> the seat that has prices of it."""

    @property
    def finished(self) -> bool:
        return self.next == len(self.meshes)

    def take(self, seat: int) -> Job | None:
        if seat == 0:
            self._accept()
        chosen = min(self._open(), key=lambda one: self._turn(*one, seat), default=None)
        if chosen is None:
            return None
        key, step = chosen
        self.begun.add((key, step))
        self.priced_at[key.number] = seat
        mesh, against = self.meshes[key.number], self._against(key)
        if step is _Step.PRICES:
            return Job((key, step), self.trials.price_ahead, (mesh,))
        if step is _Step.BOUND:
            return Job((key, step), self.trials.bound, (mesh, against))
        return Job((key, step), self.trials.trial, (mesh, against, step is _Step.GUESSED), stoppable=True)

    def _turn(self, key: _Key, step: _Step, seat: int) -> tuple[bool, _Step, int]:
        """What comes first in a seat is least."""
        # Where prices of a mesh are already, its trial is half done. Prices are made from the end, where meshes have
        # most axes and take longest; trials come from the beginning.
        elsewhere = self.priced_at.get(key.number, seat) != seat
        return elsewhere, step, -key.number if step is _Step.PRICES else key.number

    def put(self, job: Job, seat: int, value: Trial | None) -> None:
        key, step = _of(job)
        if value is not None:
            self.done[key] = value
            if value.best is not None:
                self.rivals[key] = value.rival()
        elif step is _Step.BOUND:
            self.undecided.add(key)

    def lose(self, job: Job) -> None:
        self.begun.discard(_of(job))
        self.priced_at.pop(_of(job)[0].number, None)

    def outdated(self, job: Job) -> bool:
        key, _ = _of(job)
        return all(key != other for other, _ in self._chain())

    def _accept(self) -> None:
        """Takes what is done and next, as far as that goes."""
        while not self.finished and (trial := self.done.pop(key := _Key(self.next, self.rival), None)) is not None:
            if trial.beats(self._against(key)):
                self.rival = key
            self.next += 1
            self.accept(trial)

    def _against(self, key: _Key) -> Rival | None:
        return self.first if key.rival is None else self.rivals[key.rival]

    def _chain(self) -> Iterator[tuple[_Key, bool]]:
        """What is left to be done and how it is guessed to be, in order, and whether it is sure."""
        rival, sure = self.rival, True
        for number in range(self.next, len(self.meshes)):
            key = _Key(number, rival)
            trial = self.done.get(key)
            if trial is None:
                yield key, sure
                sure = False
            elif trial.beats(self._against(key)):
                rival = key

    def _open(self) -> Iterator[tuple[_Key, _Step]]:
        """What may be begun now, in order."""
        for key, sure in self._chain():
            if not sure and not self.ahead:
                return
            for step in self._steps(key, sure):
                if (key, step) not in self.begun:
                    yield key, step

    def _steps(self, key: _Key, sure: bool) -> Iterator[_Step]:
        """What can be done for a mesh now."""
        bounding = (key, _Step.BOUND) in self.begun and key not in self.undecided
        guessing = (key, _Step.GUESSED) in self.begun
        if sure:
            if not bounding and not guessing:
                yield _Step.WHOLE
        elif key.rival is None and self.first is None:
            yield _Step.PRICES  # no bound without a rival, and the first one found changes all
        elif key in self.undecided:
            yield _Step.GUESSED
        else:
            yield _Step.BOUND


def _of(job: Job) -> tuple[_Key, _Step]:
    key, step = job.key  # type: ignore[misc]
    return key, step
