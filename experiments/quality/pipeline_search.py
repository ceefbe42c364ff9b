"""The pipeline that is chosen for small random stacks, compared with the best of all pipelines.

    python experiments/quality/pipeline_search.py [--only NUMBER ...] [--again] [--table]

There are thirty stacks of 2 to 8 layers on 8 devices, in one slice and in two. The last ten have large weights between
slices. The search chooses stages, schedule and microbatches. The enumeration plans every combination on every mesh,
without pruning and with any axis for the stages. Both choose a mesh of more axes only if it saves half a percent. Rows
are saved in `experiments/results/pipeline_search.json`, so that a broken run resumes.
"""

import dataclasses
import itertools
import math
import random
import sys
import time
from typing import TYPE_CHECKING, Any

from experiments.lib.harness import Experiment, Rows, grid, page


if TYPE_CHECKING:
    from autoshard.program import Program


COUNT = 30
LARGE = 10
"""Number of last stacks with large weights between slices, for which pipelines may pay."""
TOPOLOGIES = ("v5e:2x2*2", "v5e:2x4", "v5p:2x2x2", "v5p:2x2x1*2")
EQUAL = 1e-6
"""Relative difference of step times that count as equal."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """A step of MLPs, one after the other, which are recomputed in the backward pass."""

    topology: str
    layers: int
    width: int
    inner: int
    tokens: int
    batch: int

    def program(self, stages: int = 1, schedule: str | None = None, microbatches: int = 1) -> "Program":
        """Trace the step, in stages or not.

        Raises `UserError` for microbatches without stages.
        """
        import jax
        import jax.numpy as jnp

        import autoshard
        from autoshard.errors import UserError
        from autoshard.program import pipelined, read_pipeline, trace

        if stages == 1 and microbatches > 1:
            raise UserError("the step has no microbatches without stages")

        @jax.checkpoint
        def layer(x: Any, own: Any) -> Any:
            return x + jax.nn.gelu(x @ own["up"]) @ own["down"]

        def step(params: Any, x: Any) -> Any:
            def loss(p: Any) -> Any:
                return (autoshard.stack(layer, p["layers"], x @ p["first"]) ** 2).mean()

            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        def shape(*sizes: int) -> Any:
            return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

        up, down = (self.layers, self.width, self.inner), (self.layers, self.inner, self.width)
        weights = {"layers": {"up": shape(*up), "down": shape(*down)}, "first": shape(self.width, self.width)}
        args = (weights, shape(self.batch, self.tokens, self.width))
        with pipelined(read_pipeline(stages, microbatches, schedule)) as stacks:
            program = trace(step, args, donate_argnums=0, name="mlps")
        return dataclasses.replace(program, stacks=tuple(set(stacks)))

    @property
    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Choices of `--stages auto`, with one circular schedule."""
        counts = tuple(n for n in (1, 2, 4, 8, 16, 32) if self.batch % n == 0)
        return {"stages": (1, 2, 4, 8), "schedule": (None, "gpipe", "circular:2"), "microbatches": counts}


def stack_of(number: int) -> Stack:
    """Draw the stack of a row."""
    draw = random.Random(number)
    if number >= COUNT - LARGE:
        sizes = (8192, 32768, draw.choice((256, 512, 1024)), draw.choice((8, 16)))
        return Stack("v5e:2x2*2", draw.choice((4, 5, 6, 7, 8)), *sizes)
    width = draw.choice((512, 1024, 2048, 4096, 8192))
    return Stack(
        TOPOLOGIES[number % len(TOPOLOGIES)],
        draw.choice((2, 3, 4, 5, 6, 7, 8)),
        width,
        width * draw.choice((2, 4)),
        draw.choice((64, 128, 256, 512)),
        draw.choice((8, 16)),
    )


def options_of(stack: Stack, **mesh: Any) -> Any:
    from autoshard.planning import Options

    return Options(topology=stack.topology, refine_axes=False, **mesh)


def chosen(stack: Stack) -> tuple[tuple[Any, ...], float]:
    """Return stages, schedule and microbatches that the search chooses, and the expected step in seconds."""
    from autoshard.planning import plan_recipes

    recipe, made = plan_recipes(stack.program, stack.choices, options_of(stack), of_source=True)
    return tuple(recipe.arguments.values()), made.plan.prediction.expected_s


def enumerated(stack: Stack) -> dict[tuple[Any, ...], float]:
    """Return the expected step of every possible pipeline, and without one, on its best mesh."""
    from autoshard.base.workers import WorkerCrew
    from autoshard.cost import Topology, candidate_meshes, load_calibration
    from autoshard.errors import UserError
    from autoshard.planning import read_asked
    from autoshard.planning.mesh.mesh_attempt import unusable
    from autoshard.planning.price.analysed_program import Task, analyse_program
    from autoshard.planning.recipes.pipeline_recipes import is_sensible
    from autoshard.planning.solve.weight_search import Infeasible, search
    from autoshard.planning.space.derived_axes import LEAST_GAIN
    from autoshard.planning.space.plan_options import Limits

    steps: dict[tuple[Any, ...], float] = {}
    topology = Topology.parse(stack.topology)
    limit, figures = topology.usable_bytes, load_calibration(topology.chip)
    choices = stack.choices
    for values in itertools.product(*choices.values()):
        values_by_name = dict(zip(choices, values, strict=True))
        if not is_sensible(values_by_name, choices["microbatches"], (stack.layers,)):
            continue
        try:
            program = stack.program(**values_by_name)
        except UserError:
            continue
        reading = analyse_program(program, topology.backend)
        task = Task(program, reading, read_asked(), limit, 0, figures)
        best, fewest = math.inf, 0
        for mesh in candidate_meshes(topology):
            if unusable(reading, mesh):
                continue
            model = task.priced(mesh)
            try:
                solved = search(
                    model, [], Limits(limit, 120.0, 0), print_nothing, task.required(model), None, WorkerCrew()
                )
            except Infeasible:
                continue
            step = solved.best.expected_s
            if step < best * (1 - LEAST_GAIN if len(mesh.sizes) > fewest else 1.0):
                best, fewest = step, len(mesh.sizes)
        if best < math.inf:
            steps[values] = best
    return steps


def print_nothing(line: str) -> None:
    """Ignore a line of progress."""


def row_of(number: str) -> dict[str, Any]:
    """Compare the search with the enumeration for one stack."""
    stack = stack_of(int(number))
    began = time.process_time()
    own, expected_s = chosen(stack)
    middle = time.process_time()
    every = enumerated(stack)
    best = min(every, key=lambda values: every[values])
    return {
        "stack": dataclasses.asdict(stack),
        "chosen": own,
        "chosen_s": expected_s,
        "best": best,
        "best_s": every[best],
        "best_without_s": min(step for values, step in every.items() if values[0] == 1),
        "recipes": len(every),
        "same": own == best or abs(expected_s / every[best] - 1) <= EQUAL,
        "search_cpu_s": middle - began,
        "enumeration_cpu_s": time.process_time() - middle,
    }


def words(values: Any) -> str:
    stages, schedule, microbatches = values
    return "none" if stages == 1 else f"{stages} stages, {schedule}, {microbatches} microbatches"


def table(rows: Rows) -> str:
    lines = []
    for number, row in rows.items():
        stack = Stack(**row["stack"])
        cells = [number, stack.topology, stack.layers, f"{stack.width} x {stack.inner}"]
        cells += [f"{stack.batch} x {stack.tokens}", words(row["chosen"]), f"{row['chosen_s'] * 1e3:.4g} ms"]
        lines.append([*cells, words(row["best"]), f"{row['best_s'] * 1e3:.4g} ms", "yes" if row["same"] else "no"])
    known = rows.values()
    staged = sum(row["best"][0] > 1 for row in known)
    seconds = [sum(row[f"{which}_cpu_s"] for row in known) for which in ("search", "enumeration")]
    return page(
        "# Pipelines chosen for small stacks",
        """
`python experiments/quality/pipeline_search.py`. Stacks of MLPs (width x inner width, batch x tokens) on 8 devices.
The best is the least expected step of every pipeline on every mesh, none left out by a bound.
""",
        grid(" | topology | layers | sizes | batch | chosen | step | best of all | step | same", lines),
        f"{sum(row['same'] for row in known)} of {len(known)} the same; for {staged} of them a pipeline is best. "
        f"{sum(row['recipes'] for row in known)} recipes; the searches took {seconds[0]:.0f} s of processor, the "
        f"enumerations {seconds[1]:.0f} s. The step that is planned takes up to "
        f"{max(row['chosen_s'] / row['best_s'] - 1 for row in known):.1%} longer than the best of all, whose axis "
        "of stages may split other dims too.",
    )


def main() -> int:
    return Experiment(script=__file__, names=map(str, range(COUNT)), work=row_of, table=table).run()


if __name__ == "__main__":
    sys.exit(main())
