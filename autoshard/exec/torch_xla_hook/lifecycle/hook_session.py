"""The session of a script, from its first step to its planned steps, and its states."""

import collections
import contextlib
import functools
import itertools as it
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from autoshard.cost import Topology
from autoshard.exec.torch_xla_hook.capture.first_step import Watch
from autoshard.exec.torch_xla_hook.capture.host_ops import stand_in_on_host
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Capture, capture, own_sharding
from autoshard.exec.torch_xla_hook.capture.op_events import stand_in, without_observers
from autoshard.exec.torch_xla_hook.capture.value_reads import Reads, from_shards
from autoshard.exec.torch_xla_hook.lifecycle.abstract_first_step import UploadPlanner
from autoshard.exec.torch_xla_hook.pins.input_placement import (
    fits_whole,
    group_here,
    planned_proto,
    replay,
    split_inputs,
)
from autoshard.exec.torch_xla_hook.pins.later_steps import LaterMarks, Shaped, shaped
from autoshard.exec.torch_xla_hook.pins.pinned_values import Pins
from autoshard.exec.torch_xla_hook.planning.decision_cache import cached_mesh, kept_decision
from autoshard.exec.torch_xla_hook.planning.runtime_topology import live_mesh, mesh_here, topology_here
from autoshard.exec.torch_xla_hook.planning.step_files import (
    RefusedPlan,
    check_here,
    given_decision,
    given_mesh,
    write_step,
)
from autoshard.exec.torch_xla_hook.values.lazy_tensors import (
    become,
    compute,
    is_traced,
    leaves,
    live_pending,
    on_xla,
    pending,
    plain,
    shared_storages,
    xlac,
)
from autoshard.exec.torch_xla_hook.values.live_marks import (
    LiveMesh,
    UserMarks,
    annotated,
    is_split,
    mark,
    sharding_text,
)
from autoshard.exec.torch_xla_hook.values.module_hooks import Guard, error_text, is_strict
from autoshard.planning import Plan, Spec


log = logging.getLogger("autoshard.torch_xla")

_KNOWN_STEPS = 2
"""Number of consecutive planned steps after which watching ends. Modules moved until then are awaited by call hooks."""


_TRIES = 2
"""Number of steps of the same calls that are planned without success before such steps are left alone."""

_ABSENT = object()
"""Mark of a tensor that a table does not have."""

_HOST_STEPS = 2
"""Number of steps, from the planned step on, after which all ops that run on the host are known."""


_BUCKET = 2.0
"""Ratio of sizes up to which a call of other shapes runs under a known plan.

A plan for sizes twice as large may split otherwise, which is worth the seconds of planning.
"""


class Signature(NamedTuple):
    """The properties that give two calls of a module the same graph."""

    module: int
    """The module's number."""
    training: bool
    """The module's training mode."""
    gradients: bool
    """True if gradients are enabled."""
    shapes: tuple[Shaped, ...]
    """Shapes and dtypes of the tensors among the arguments."""

    def is_like(self, other: "Signature") -> bool:
        """Return True if another call differs at most in the sizes of dims."""
        kinds = [[(len(shape), dtype) for shape, dtype in each.shapes] for each in (self, other)]
        return self[:3] == other[:3] and kinds[0] == kinds[1]


def _elements(signature: Signature) -> int:
    """Return the number of elements of a call's tensors."""
    return sum(math.prod(shape) for shape, _ in signature.shapes)


class Session:
    """Auto-sharding of one process. If `armed`, a step is watched, and the next step boundary plans the pending
    graph.
    """

    def __init__(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.plans: list[Plan] = []
        """Plans that were made, in order; their positions are their numbers."""
        self._mesh: dict[str, int] | None = None
        self.guard = Guard(self._give_up)
        self.marks = UserMarks()
        """The script's own marks."""
        self.applied = LaterMarks(self.guard)
        """Specs that later steps apply."""
        self.ahead = UploadPlanner(self.marks, self.applied)
        """Modules that are not uploaded yet."""
        self.armed = False
        """True while a step is watched."""
        self._said: set[str] = set()
        """Warnings about steps that could not be planned; each is issued once."""
        self._watch: Watch | None = None
        self._reads = Reads(self.on_read)
        self._seen: dict[Signature, int | None] = {}
        """The plan's number for each signature of a planned forward call; None if the call could not be planned."""
        self._current: set[Signature] = set()
        """Signatures of the calls in the watched step."""
        self._looked: set[Signature] = set()
        """Signatures whose results were read before the script could have asked for gradients."""
        self._known_steps = 0
        """Number of consecutive steps that were planned already."""
        self._host_steps = 0
        """Number of further steps that are searched for ops on the host."""
        self._moved: weakref.WeakSet[Any] = weakref.WeakSet()
        """Modules that were moved to the device; call hooks await their first call when watching ends."""
        self._numbers: Any = WeakIdKeyDictionary()
        """A unique number for each module."""
        self._count = it.count()
        self._live: LiveMesh | None = None
        """The mesh of the last plan."""
        self._watched_at_failure = False
        """True if the hook failed while a step was watched."""
        self._failures: collections.Counter[Signature] = collections.Counter()
        """Number of steps that could not be planned, by the signatures of their calls."""
        self._unsure: set[Signature] = set()
        """Signatures that are planned as inference, though the script could still ask for gradients."""
        self._settled: set[Signature] = set()
        """Signatures whose plan as inference was dropped, since an optimizer step followed."""

    @property
    def mesh(self) -> dict[str, int] | None:
        """The mesh that the script gave or the search found; None to use the environment's."""
        return self._mesh

    @mesh.setter
    def mesh(self, sizes: dict[str, int] | None) -> None:
        if sizes != self._mesh:
            self.applied.batches.clear()  # new batches were split over axes that no longer exist
        self._mesh = sizes

    @contextlib.contextmanager
    def untracked(self, one: Any, other: Any) -> Iterator[None]:
        """Drop all weak references to two tensors while a script swaps them: PyTorch refuses to swap with any.

        Afterwards the tensors have their own specs again, if their shapes are equal; else they have none. Entries that
        belong to the data, marks and waiting uploads, are exchanged with it.
        """
        by_object = (self.applied.state, self.applied.specs, self.applied.trained)
        by_data = (self.ahead.waiting, self.marks.tensors)
        pair = (plain(one), plain(other))
        entries = [(table, [table.pop(each, _ABSENT) for each in pair]) for table in (*by_object, *by_data)]
        self.applied.forget_list()
        if self._watch is not None:
            self._watch.forget_live(pair)
        same_shape = pair[0].shape == pair[1].shape
        try:
            yield
        finally:
            for table, values in entries:
                if any(table is each for each in by_data):
                    values = reversed(values)
                elif not same_shape:
                    continue
                for each, value in zip(pair, values, strict=True):
                    if value is not _ABSENT:
                        table[each] = value

    def arm(self) -> None:
        """Watch from now on, until the next step boundary, with no plan active; do nothing if that is so already or
        after a failure.
        """
        if not self.armed and not self.guard.failed:
            self.armed = True
            self.applied.now.plan = None
            self._known_steps = 0
            self._current = set()
            self._looked = set()
            self._watch = Watch(self._on_forward, self.guard, self.ahead.live_data)
            self._watch.start()
            self._reads.start()
            stand_in()

    def disarm(self) -> None:
        """Stop watching and reading, and observe only the ops that are pinned."""
        if self._watch is not None:
            self._watch.stop()
        self._watch = None
        self._reads.stop()
        self.armed = False
        stand_in(self.applied.kinds)

    def _give_up(self) -> None:
        """Stop all work on the step: split tensors stay split, and nothing else is done."""
        self.applied.now.plan = None
        self._watched_at_failure = self.armed
        self.disarm()

    def _recover(self) -> None:
        """Watch the next step if the failed one was watched; planned calls find their plans again in any case."""
        self.applied.now.pinned.clear()
        if self._watched_at_failure:
            self.arm()

    def await_module(self, module: Any) -> None:
        """Prepare to plan the first step of a module that has moved from the host to the device; watch from now on.

        Raises `UserError` as `check_here` does: before the first step, not in it.
        """
        if self.mesh is None:
            check_here()
        self._moved.add(module)
        self.ahead.moved(module)
        self.arm()

    def promise_module(self, module: Any) -> None:
        """Prepare to materialise a module on the meta device, which was moved, at its first call; watch from now on."""
        self.ahead.promised(module)
        self.arm()

    def _on_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Record a forward call of the watched step; return True if a step of inference begins.

        It does if the same call was read before, and the script has not asked for gradients since. A module that must
        be planned before its upload is planned and uploaded here.
        """
        topology = topology_here()
        if self.ahead.needs(module, topology):
            find_mesh = functools.partial(self._mesh_for, topology, self.mesh or mesh_here())
            self.ahead.split(module, (args, kwargs), topology, find_mesh)
        signature = self.signature(module, args, kwargs)
        watch = self._watch
        again = watch is not None and signature in self._looked and not watch.went_back
        if again:
            self._current = set()
        self._current.add(signature)
        return again

    def on_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the batch of a known module's call; make its plan the current one, or watch the step if the call is new.

        While a step is watched only the batch is marked.
        """
        signature = self.signature(module, args, kwargs)
        planned = None if self.armed or signature in self._seen else self._near(signature)
        tensors = [tensor for _, tensor in leaves((args, kwargs), "batch")]
        self.applied.mark_batch(tensors, None if planned is None else planned.shapes)
        if self.armed:
            return
        if signature in self._seen or planned is not None:
            self.applied.now.plan = self._seen[planned or signature]
            return
        self.arm()
        assert self._watch is not None
        self._watch.join(module, args, kwargs)

    def _near(self, signature: "Signature") -> "Signature | None":
        """Return the planned call, nearest in size, whose plan a call of other shapes runs under; None if it gets
        its own plan.

        The calls differ in sizes alone, by at most `_BUCKET` in all, and the planned splits divide the new sizes. The
        plan's peak of memory, grown as the sizes are, still fits.
        """
        size = _elements(signature)
        found: tuple[float, Signature] | None = None
        for other, number in self._seen.items():
            if number is None or not signature.is_like(other) or not size:
                continue
            ratio = size / max(_elements(other), 1)
            plan = self.plans[number]
            if not 1 / _BUCKET <= ratio <= _BUCKET or ratio * plan.prediction.peak_bytes > plan.memory_limit_bytes:
                continue
            if self.applied.divides(signature.shapes, other.shapes):
                found = min(found or (math.inf, other), (max(ratio, 1 / ratio), other), key=lambda each: each[0])
        return None if found is None else found[1]

    def on_sync(self) -> None:
        """Plan the pending graph at a step boundary if it is watched and new; else mark the state.

        A known step is skipped, and a step without modules is planned only if it has a matmul or a convolution. In a
        step with a failure of the hook nothing is done but to prepare for the next one.
        """
        if self.guard.failed:
            if self.guard.recover():
                self._recover()
            return
        roots: Sequence[Any] = ()
        watch = self._watch
        with self.guard:
            if watch is not None and self._is_known():
                self._pass_by(watch)
            elif watch is not None:
                roots = self._roots(watch)
                roots = roots if watch.seen or (roots and _is_heavy(roots)) else ()
        if roots and watch is not None:
            self._plan(watch, roots)
        else:
            with self.guard:
                self.applied.mark_state()
        self.applied.now.step += 1
        self.applied.now.pinned.clear()
        if self._host_steps and self.plans:
            self._host_steps -= 1
            with self.guard:
                stand_in_on_host()

    def on_read(self, tensor: Any) -> None:
        """Respond to a read of a value: if a whole step is pending, plan and run it now.

        Nothing is planned if no module has run, or if the step is known and so skipped. In training nothing is planned
        for a value that is computed already, since such a read runs nothing; inference may end with it. Nor is anything
        planned in the middle of a call, or in a training step before parameters are updated. The data behind such a
        read is recorded instead.
        """
        watch = self._watch
        if watch is None or not on_xla(tensor) or not watch.seen or is_traced():
            return
        roots: Sequence[Any] = ()
        with self.guard:
            if watch.training and not any(pending([plain(tensor)])):
                return
            if watch.is_calling:
                watch.note_read(plain(tensor))
                return  # a check of a mask, say
            roots = self._roots(watch)
            if watch.training and not watch.infers and not watch.changed(roots):
                self._looked |= self._current
                watch.note_read(plain(tensor))
                return  # a loss read in the middle of a step, or inference: the next call shows which
            if self._is_known():
                self._pass_by(watch)
                return
        computed = self._plan(watch, roots) if roots else ()
        if computed:
            xlac()._xla_sync_multi([*computed], [], wait=False, sync_xla_data=True)

    def whole(self, tensors: Sequence[Any]) -> list[Any]:
        """Return tensors with the same values on the host, or replicated on every device, in place of the split ones.

        Tensors that are not split are returned unchanged, after they are computed. PyTorch/XLA compiles a program each
        time that it gathers a split tensor for the host. Reading the shards needs no compilation. If other processes
        own some shards, or gradients must flow back, a lazy graph gathers, which is compiled once.
        """
        import torch

        results = list(tensors)
        if self._live is None or is_traced():
            return results
        with self.guard, without_observers():
            inner = {number: plain(each) for number, each in enumerate(results) if on_xla(each) and each.dim()}
            # Other classes wrap other tensors.
            inner = {n: each for n, each in inner.items() if type(each) in (torch.Tensor, torch.nn.Parameter)}
            compute(list(inner.values()))
            split = {number: each for number, each in inner.items() if is_split(sharding_text(each))}
            goes_back = {n for n in split if torch.is_grad_enabled() and results[n].requires_grad}
            apart = [number for number in split if number not in goes_back]
            read = dict(zip(apart, from_shards([split[number] for number in apart]), strict=False))
            for number, each in split.items():
                spec = Spec(((),) * each.dim())
                results[number] = read[number] if number in read else annotated(each, [self._live.sharding(spec)])
        return results

    def _is_known(self) -> bool:
        """Return True if the watched step has calls and all of them were planned, or could not be planned, before."""
        return bool(self._current) and self._current <= self._seen.keys()

    def _pass_by(self, watch: Watch) -> None:
        """Skip a known step: forget its calls and values.

        After `_KNOWN_STEPS` of them in a row watching ends, and moved modules are awaited by call hooks.
        """
        self._current = set()
        watch.restart()
        self._known_steps += 1
        if self._known_steps == _KNOWN_STEPS:
            self.disarm()
            self.applied.hook_calls(list(self._moved), self.on_call)

    def signature(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Signature":
        """Return the properties that give two calls of a module the same graph."""
        import torch

        if module not in self._numbers:
            self._numbers[module] = next(self._count)
        number = self._numbers[module]
        shapes = tuple(shaped(tensor) for _, tensor in leaves((args, kwargs), ""))
        return Signature(number, module.training, torch.is_grad_enabled(), shapes)

    def on_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record an optimizer that begins its step; drop plans that took its step for inference.

        `args` and `kwargs` are those of the step, unused. Optimizers of models on the host are ignored.
        """
        watch, unsure = self._watch, self._unsure
        if (watch is None and not unsure) or is_traced():
            return
        with self.guard:
            if not any(on_xla(parameter) for group in optimizer.param_groups for parameter in group["params"]):
                return  # an optimizer of a model on the host
            if watch is not None:
                watch.learn_state(optimizer)
            self._seen = {key: plan for key, plan in self._seen.items() if key not in unsure}
            self._settled |= unsure
            self._unsure = set()

    def _roots(self, watch: Watch) -> list[Any]:
        """Return the live pending tensors in a stable order, without the recorded copies."""
        recorded = {id(tensor) for tensor in watch.recorded.values()}
        return [root for root in live_pending(watch.persistent()) if id(root) not in recorded]

    def _plan(self, watch: Watch, roots: Sequence[Any]) -> Sequence[Any]:
        """Plan the pending graph, and replace `roots` by the results of its planned run; watching ends.

        Return the tensors that this run computes: `roots`, and inputs that are split on the way. If planning failed,
        warn and return none, and try once more at the next such step; with `AUTOSHARD_STRICT` the error is raised.
        Errors in the user's mesh or settings are always raised.
        """
        current, self._current = self._current, set()
        before = dict(self._seen)
        self._seen |= dict.fromkeys(current)
        topology = topology_here()
        sizes = self.mesh or mesh_here()  # the user must correct errors in these
        group = group_here()
        mesh = given_mesh() or (None if sizes is None else live_mesh(topology, sizes))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                computed = self._plan_pending(watch, roots, topology, mesh, group)
            self._seen |= dict.fromkeys(current, len(self.plans) - 1)
            self._host_steps = _HOST_STEPS
            if not watch.went_back:
                self._unsure |= {key for key in current - self._settled if key.gradients}
            return computed
        except RefusedPlan:
            raise
        except Exception as error:  # the user's training continues after any error
            if is_strict():
                raise
            sentence = f"autoshard: this step runs replicated, since it could not be planned: {error_text(error)}"
            if sentence not in self._said:
                warnings.warn(sentence, stacklevel=3)
            self._said.add(sentence)
            self._failures.update(current)
            self._seen = {key: None for key in current if self._failures[key] >= _TRIES} | before
            with self.guard:
                self.applied.hook_calls(watch.outermost, self.on_call)
            return ()
        finally:
            self.disarm()

    def _mesh_for(self, topology: str, sizes: dict[str, int] | None, read: Callable[[LiveMesh], Capture]) -> LiveMesh:
        """Return the mesh of these sizes; if they are None, search the best mesh for the captured graph.

        `read` captures the graph for a mesh. A mesh that was found becomes the session's.
        """
        if sizes is None:
            one_axis = live_mesh(topology, {"data": Topology.parse(topology).num_devices})
            sizes = self.mesh = cached_mesh(read(one_axis), topology)
        return live_mesh(topology, sizes)

    def _plan_pending(
        self, watch: Watch, roots: Sequence[Any], topology: str, mesh: LiveMesh | None, group: bool | None
    ) -> Sequence[Any]:
        """Plan the pending graph after capturing it, and replace its tensors by the results of the planned run.

        - `watch`: watcher of the step; its recorded values are released.
        - `roots`: live pending tensors, which become the results.
        - `topology`: name of the devices' topology.
        - `mesh`: the mesh to plan for; None to search it.
        - `group`: if True, inputs are split in one run; None to decide by memory.

        Return the tensors that the planned run computes. A first training plan may change specs of earlier plans of
        inference; all other plans retain them. Raises `UserError` if the graph cannot be planned.
        """
        every = list(watch.recorded.items())
        waits = pending([tensor for _, tensor in every])  # values that the script has read are computed already
        calls = [call for (call, _), waiting in zip(every, waits, strict=True) if waiting]
        recorded = [tensor for (_, tensor), waiting in zip(every, waits, strict=True) if waiting]
        del every
        shapes = [tuple(tensor.shape) for tensor in recorded]
        training = watch.training and (watch.went_back or watch.changed(roots))
        watch.explain(roots)
        read = functools.partial(
            capture,
            roots,
            recorded,
            watch.known,
            training,
            watch.title(),
            marks=self.marks,
            own_pins=self.applied.waiting_pins(),
        )
        mesh = mesh or self._mesh_for(topology, None, lambda mesh, read=read: read(mesh=mesh))
        self._live = mesh
        captured = read(mesh=mesh)
        del recorded, read
        numbers = {handle: number for number, handle in enumerate(captured.handles)}
        reads = [
            (call, shape, (-1, numbers[handle])) for call, (shape, handle) in watch.held.items() if handle in numbers
        ]
        watch.forget()
        replaces = training and not any(
            tensor in self.applied.trained for tensor in captured.tensors if tensor is not None
        )
        fixed = {} if replaces else self.applied.decided(captured, watch.outermost)
        given = given_decision(captured, mesh) if replaces or not self.plans else None
        decision = given or kept_decision(captured, topology, mesh, fixed, free=replaces)
        plan = decision.plan
        if replaces and self.applied.moves(captured, decision):
            # Plans of inference expect another split of these tensors.
            self._seen = {key: plan for key, plan in self._seen.items() if key.gradients}
        group = fits_whole(captured, decision) if group is None else group
        shared = shared_storages()
        inputs, waiting = split_inputs(captured, decision, mesh, group, shared)
        outputs = replay(planned_proto(captured, plan, mesh), inputs)
        for root, output, result in zip(captured.roots, outputs, captured.program.results, strict=True):
            become(root, output, shared)
            if result.shape:
                own = own_sharding(captured, result.argument, mesh)
                mark(root, mesh.sharding(plan.results[result.name]) if own is None else own)
        self.applied.apply_decision(
            captured,
            decision,
            mesh,
            Pins([*zip(calls, shapes, captured.places, strict=True), *reads], captured.flow),
            watch,
        )
        self.applied.hook_calls(watch.outermost, self.on_call)
        write_step(len(self.plans), captured, plan)
        self.plans.append(plan)
        log.info("planned %s: %s", plan.program_name, "; ".join(plan.words) or "everything is replicated")
        for sentence in decision.notes:
            log.warning("%s", sentence)
        return [*roots, *waiting]


def _is_heavy(roots: Sequence[Any]) -> bool:
    """Return True if a graph without modules is worth planning: the text of its lazy IR has a matmul or a
    convolution.
    """

    text = xlac()._get_xla_tensors_text(list(roots))
    return any(f"aten::{op}" in text for op in ("mm", "bmm", "addmm", "einsum", "convolution", "matmul"))
