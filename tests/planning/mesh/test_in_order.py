"""Trials that several workers run at once are recorded in the order of a serial run."""

import random

import pytest

from autoshard.base.worker import Job
from autoshard.cost import Mesh, Topology, candidate_meshes
from autoshard.planning.mesh.mesh_attempt import Incumbent, MeshAttempt, MeshAttempts, MeshBest
from autoshard.planning.mesh.mesh_search import InOrder


MESHES = candidate_meshes(Topology.parse("v5p:4x4x8"))


class Made(MeshAttempts):
    """MeshAttempts with made-up outcomes that depend only on the mesh and on the incumbent."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.steps = {mesh: draw.choice([1.0, 2.0, 3.0, draw.uniform(1, 4), None]) for mesh in MESHES}
        self.calls = 0

    def price_ahead(self, mesh: Mesh) -> None:
        self.calls += 1

    def bound(self, mesh: Mesh, rival: Incumbent | None) -> MeshAttempt | None:
        self.calls += 1
        step = self.steps[mesh]
        return None if step is not None and (rival is None or step < 1.5 * rival.step_s) else self.made(mesh, rival)

    def attempt(self, mesh: Mesh, rival: Incumbent | None, keep: bool, stop: object = None) -> MeshAttempt:
        self.calls += 1
        return self.made(mesh, rival)

    def made(self, mesh: Mesh, rival: Incumbent | None) -> MeshAttempt:
        step, weights = self.steps[mesh], {(0, "compute"): 1.0 if rival is None else rival.weights[0, "compute"] / 2}
        bound = 0.5 if rival is None else rival.step_s + sum(rival.weights.values())
        if step is None:
            return MeshAttempt(mesh, bound_s=bound, weights=weights)
        return MeshAttempt(mesh, bound_s=bound, best=best_of(mesh, step), weights=weights)


def best_of(mesh: Mesh, step: float) -> MeshBest:
    outcome = type("Outcome", (), {"step_time_s": step})()
    return MeshBest(mesh, None, outcome, 0.0, None, 0.0, 1)  # type: ignore[arg-type]


def figures(trials: list[MeshAttempt]) -> list[tuple[object, ...]]:
    return [(trial.mesh.axes, trial.step_s, trial.bound_s, trial.weights) for trial in trials]


def run(made: Made, slots: int, ahead: bool, seed: int) -> list[tuple[object, ...]]:
    """Let slots start and finish jobs at random, lose some, and stop some outdated ones. Return the trials in order."""
    taken: list[MeshAttempt] = []
    work, draw = InOrder(made, MESHES, taken.append, ahead), random.Random(seed)
    doing: dict[int, Job] = {}
    while True:
        slot = draw.randrange(slots)
        job = doing.pop(slot, None)
        if job is None:
            job = work.take(slot)
            if job is None and slot == 0 and work.finished:
                return figures(taken)
            if job is not None:
                doing[slot] = job
            assert doing or slot != 0, "this process would wait for ever"
        elif (job.stoppable and work.outdated(job) and draw.random() < 0.5) or (slot and draw.random() < 0.05):
            work.lose(job)
        else:
            work.put(job, slot, job.call(*job.arguments))


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_does_not_depend_on_order(seed: int) -> None:
    alone = Made(seed)
    expected = run(alone, slots=1, ahead=False, seed=0)
    assert len(expected) == len(MESHES) == alone.calls, "one by one, no more than that is done"
    for slots in (1, 2, 4):
        assert run(Made(seed), slots, ahead=True, seed=seed) == expected
