"""From the first step of a script to its planned steps: the states between which the hook moves."""

import functools
import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook._apply_plan import Applied
from autoshard.exec.torch_xla_hook._capture import capture
from autoshard.exec.torch_xla_hook._here import live_mesh, mesh_here, topology_here
from autoshard.exec.torch_xla_hook._marks import LiveMesh, mark
from autoshard.exec.torch_xla_hook._moves import fits_whole, group_here, split_inputs
from autoshard.exec.torch_xla_hook._ops import stand_in
from autoshard.exec.torch_xla_hook._pinned import Pins
from autoshard.exec.torch_xla_hook._planning import best_mesh, decide
from autoshard.exec.torch_xla_hook._reads import Reads
from autoshard.exec.torch_xla_hook._replay import planned_proto, replay
from autoshard.exec.torch_xla_hook._tensors import become, leaves, live_pending, on_xla, pending
from autoshard.exec.torch_xla_hook._watch import Watch
from autoshard.exec.torch_xla_hook._xlac import xlac
from autoshard.plan import Plan


log = logging.getLogger("autoshard.torch_xla")

STRICT_VARIABLE = "AUTOSHARD_STRICT"


class Session:
    """Auto-sharding of one process. `armed`: the next step boundary plans the pending graph."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self._mesh: dict[str, int] | None = None
        self.applied = Applied()
        self.armed = False
        self.failed = False
        self._trained = False
        self._watch: Watch | None = None
        self._reads = Reads(self.on_read)
        self._seen: set[tuple[Any, ...]] = set()
        """Signatures of forward calls that are planned (or could not be)."""
        self._current: set[tuple[Any, ...]] = set()

    @property
    def mesh(self) -> dict[str, int] | None:
        """What the script says, or what was found to be best; otherwise the environment's."""
        return self._mesh

    @mesh.setter
    def mesh(self, sizes: dict[str, int] | None) -> None:
        if sizes != self._mesh:
            self.applied.batches.clear()  # new batches were split over axes that are no more
        self._mesh = sizes

    def arm(self) -> None:
        """Watch from now on, until the next step boundary."""
        if not self.armed:
            self.armed = True
            self._watch = Watch(self._on_forward)
            self._watch.start()
            self._reads.start()
            stand_in()

    def disarm(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = None
        self._reads.stop()
        self.armed = False
        stand_in(self.applied.kinds)

    def _on_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._current.add(signature(module, args, kwargs))

    def on_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A known module is called in a planned step: mark its batch; what was never seen is planned next."""
        self.applied.mark_batch(leaves((args, kwargs), "batch"))
        if not self.armed and signature(module, args, kwargs) not in self._seen:
            self.arm()
            assert self._watch is not None
            self._watch.join(module, args, kwargs)

    def on_sync(self) -> None:
        """A step boundary: everything pending is about to run."""
        if self.armed:
            watch = self._watch
            assert watch is not None
            if self._current and self._current <= self._seen:  # a step that is planned already
                self._current = set()
                watch.restart()
            else:
                roots = self._roots(watch)
                if roots and (watch.seen or _is_heavy(roots)):
                    self._plan(watch, roots)
                    return
        self.applied.mark_state()

    def on_read(self, tensor: Any) -> None:
        """A value is about to be read. If a whole step is pending it is planned and run now."""
        watch = self._watch
        if watch is None or not on_xla(tensor) or not watch.seen:
            return
        roots = self._roots(watch)
        if watch.training and not watch.changed(roots):
            return  # a loss that is looked at in the middle of a step
        computed = self._plan(watch, roots) if roots else ()
        if computed:
            xlac()._xla_sync_multi([*computed], [], wait=False, sync_xla_data=True)

    def _roots(self, watch: Watch) -> list[Any]:
        kept = {id(tensor) for tensor in watch.recorded.values()}
        return [root for root in live_pending(watch.persistent()) if id(root) not in kept]

    def _plan(self, watch: Watch, roots: Sequence[Any]) -> Sequence[Any]:
        """Plan the pending graph, and make `roots` the results of its planned run.

        The tensors that this run computes: `roots` and what is split on the way; none if it could not be planned.
        """
        self._seen |= self._current
        self._current = set()
        topology = topology_here()
        sizes = self.mesh or mesh_here()  # what is wrong with these, the user has to mend
        group = group_here()
        mesh = None if sizes is None else live_mesh(topology, sizes)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return self._plan_pending(watch, roots, topology, mesh, group)
        except Exception as error:  # whatever went wrong, the user's training goes on
            if os.environ.get(STRICT_VARIABLE, "0") not in ("", "0"):
                raise
            if not self.failed:
                reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"autoshard: this step runs replicated, since it could not be planned: {reason}", stacklevel=3
                )
            self.failed = True
            return ()
        finally:
            self.disarm()

    def _plan_pending(
        self, watch: Watch, roots: Sequence[Any], topology: str, mesh: LiveMesh | None, group: bool | None
    ) -> Sequence[Any]:
        every = list(watch.recorded.items())
        waits = pending([tensor for _, tensor in every])  # what a script has read in between is computed already
        calls = [call for (call, _), waiting in zip(every, waits, strict=True) if waiting]
        recorded = [tensor for (_, tensor), waiting in zip(every, waits, strict=True) if waiting]
        del every
        shapes = [tuple(tensor.shape) for tensor in recorded]
        read = functools.partial(capture, roots, recorded, watch.known, watch.training, watch.title())
        if mesh is None:
            whole = live_mesh(topology, {"data": Topology.parse(topology).num_devices})
            self.mesh = best_mesh(read(whole), topology)
            mesh = live_mesh(topology, self.mesh)
        taken = read(mesh)
        del recorded, read
        numbers = {handle: number for number, handle in enumerate(taken.handles)}
        held = [
            (call, shape, (-1, numbers[handle])) for call, (shape, handle) in watch.held.items() if handle in numbers
        ]
        watch.forget()
        replaces = watch.training and not self._trained
        fixed = {} if replaces else self.applied.decided(taken)
        decision = decide(taken, topology, mesh, fixed)
        plan = decision.plan
        group = fits_whole(taken, decision) if group is None else group
        inputs, waiting = split_inputs(taken, decision, mesh, group, replaces)
        outputs = replay(planned_proto(taken, plan, mesh), inputs)
        for root, output, result in zip(taken.roots, outputs, taken.program.results, strict=True):
            if result.shape:
                mark(output, mesh.sharding(plan.results[result.name]))
            become(root, output)
        self.applied.take(
            taken, decision, mesh, Pins([*zip(calls, shapes, taken.places, strict=True), *held], taken.flow), watch
        )
        self.applied.hook_calls(watch.outermost, self.on_call)
        self._trained |= watch.training
        self.plans.append(plan)
        log.info("planned %s: %s", plan.program_name, "; ".join(plan.words) or "everything is replicated")
        for sentence in decision.notes:
            log.warning("%s", sentence)
        return [*roots, *waiting]


def signature(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two calls of a module the same graph: shapes, and whether gradients are kept."""
    import torch

    shapes = tuple((tuple(tensor.shape), tensor.dtype) for _, tensor in leaves((args, kwargs), ""))
    return id(module), module.training, torch.is_grad_enabled(), shapes


def _is_heavy(roots: Sequence[Any]) -> bool:
    """Whether a graph without modules is worth planning: it has a matmul or a convolution."""

    text = xlac()._get_xla_tensors_text(list(roots))
    return any(f"aten::{op}" in text for op in ("mm", "bmm", "addmm", "einsum", "convolution", "matmul"))
