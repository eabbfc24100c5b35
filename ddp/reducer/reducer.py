"""The reducer: averages gradients over all ranks while the backward pass computes them.

Algorithm 1 of PyTorch Distributed (VLDB 2020, section 3.2). Unlike there, the graph is searched with
``skip_all_reduce_unused_params`` only; otherwise, what is unused in a pass is what the autograd engine has
not brought when it ends. A pass is synchronised where a forward that it belongs to ran outside ``no_sync``.
The way of a gradient is in ``docs/internals/architecture.md``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.futures import Future

from collectives.ddp.errors import GradientSyncError
from collectives.ddp.logging_data import IterationClock, Mark
from collectives.ddp.module.arguments import Settings
from collectives.ddp.module.mixed_precision import CastParameters
from collectives.ddp.module.structure import Kinds
from collectives.ddp.reducer import engine
from collectives.ddp.reducer.averaging import Averager, DelayedGradients, SparseGradients
from collectives.ddp.reducer.backward_pass import (
    CONVERTED,
    BackwardPass,
    ErrorReport,
    Forward,
    Progress,
    UnevenForward,
)
from collectives.ddp.reducer.buckets import (
    Bucket,
    GradBucket,
    Gradients,
    Hook,
    OrderTrace,
)
from collectives.ddp.reducer.end_of_pass import EndOfPass
from collectives.ddp.reducer.recovery import Recovery
from collectives.ddp.reducer.unused import UnusedParameters
from collectives.dynamo import leave_uncompiled
from collectives.errors import DistError

_WRAP_AGAIN = "wrap the module again after such a change"

_T = TypeVar("_T")


@leave_uncompiled
def _weak_hook(tell: Callable[[_T], None], what: _T) -> Callable[[torch.Tensor], None]:
    """Returns a hook of a gradient that calls a method of a reducer, which it holds weakly."""
    reference = weakref.WeakMethod(tell)

    def hook(parameter: torch.Tensor) -> None:  # noqa: ARG001
        live = reference()
        if live is not None:
            live(what)

    return hook


class Reducer:
    """Averages the gradients of some parameters over a group, in place, at every synchronised pass.

    All ranks make one with the same parameters in the same order, and the same options. It has hooks on the
    parameters until it is deleted; they hold it weakly.

    Attributes:
        gradients: the gradients and their buckets.
        passes: number of synchronised passes that ended well.
        unused: which parameters they left unused.
        initial_bucket_bytes: sizes of the buckets before the first pass.
        has_rebuilt_buckets: whether the ranks have agreed on the order of the gradients.
        defers_errors: whether errors of other ranks may be raised before the next pass.
        clock: times of the iterations.
        hook: the communication hook, which reduces instead of the group, with its state; or ``None``.

    Args:
        settings: of the model.
        casts: what stands in for the parameters while forward and backward run.
    """

    def __init__(self, settings: Settings, casts: CastParameters | None) -> None:
        parameters, group, device = settings.parameters, settings.group, settings.device
        self._settings = settings
        self._group = group
        self._frozen = dict(settings.frozen)
        self._casts = casts
        self._averager = Averager(group)
        for parameter in parameters.values():
            real = parameter.is_floating_point() and settings.reduce_dtype
            self._averager.op_for(real or parameter.dtype, parameter.device)
        self._accumulators: dict[object, int] = {}
        self.unused = UnusedParameters(settings, self._accumulators)
        self._order = OrderTrace(range(len(parameters) - 1, -1, -1))
        self._recovery = Recovery.of(settings, self)
        explain = self._recovery.explain_last
        self._end = EndOfPass(settings, self._averager, self.unused, self._order, explain)
        self.defers_errors = self._end.deferred
        self._kinds = Kinds({**parameters, **settings.delayed})
        self._delayed = DelayedGradients(settings, self._averager)
        self.gradients = Gradients(settings, self._end.tail_size)
        self.clock = IterationClock(device)
        rows = {index: self.gradients[index].parameter for index in self.gradients.sparse}
        self._sparse = SparseGradients(rows, self._averager, device) if rows else None
        self.hook: tuple[Hook, Any] | None = None
        self._is_local = False  # nothing communicates, because the hook does not
        self._next = 0  # bucket to launch
        self._abandoned: list[Any] = []  # issued, with a result that nobody wants; to be waited for
        self._left: list[tuple[Future[Any], torch.Tensor]] = []  # which a hook may yet write
        self.initial_bucket_bytes = [bucket.nbytes for bucket in self.gradients.buckets]
        self._lock = threading.RLock()
        self.passes = 0
        self.has_rebuilt_buckets = False
        self._uneven: UnevenForward | None = None
        self._must_rebuild = False
        self._was_captured = False
        self._latest: Forward | None = None
        self._is_retired = False
        self._running: Forward | None = None
        self._shadowed: list[Forward] = []
        self._open_tasks: set[int] = set()
        self._task = engine.NO_TASK
        self._pass = BackwardPass([], ErrorReport(), ())
        self._find_accumulators()
        self._reset()
        hooked = [*enumerate(self.gradients.parameters)]
        hooked += [(~place, parameter) for place, parameter in enumerate(self._delayed.hooked)]
        self._hooks = engine.GradientHooks((p, _weak_hook(self.autograd_hook, index)) for index, p in hooked)
        known = (*parameters.values(), *settings.delayed.values(), *self._frozen.values())
        self._known = set(map(id, known))
        self._strangers = engine.GradientHooks([])

    # ---- what the module calls ---------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is going on."""
        return bool(self._open_tasks)

    @property
    def ready_order(self) -> list[int]:
        """Indices of the parameters in the order of their gradients in the last pass that ended well."""
        return self._order.latest if self.passes else []

    def watch(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Takes the parameters that the module has by now; a gradient that is not averaged is an error.

        Args:
            parameters: by name.
        """
        strangers = {name: p for name, p in parameters.items() if id(p) not in self._known}
        self._frozen.update((name, p) for name, p in strangers.items() if not p.requires_grad)
        self._known.update(map(id, self._frozen.values()))
        self._strangers = engine.GradientHooks(
            (p, _weak_hook(self.stranger_hook, name)) for name, p in strangers.items() if p.requires_grad
        )

    def register_hook(self, state: object, hook: Hook) -> None:
        """Hands the reduction of full buckets to a communication hook."""
        self.hook = hook, state
        is_local = bool(getattr(hook, "is_local", False))
        self._is_local = self._end.is_local = self.unused.is_local = is_local
        self.gradients.copy_all()
        if not is_local:
            self._end.send_separately()

    def set_static_graph(self) -> None:
        """Promises from now on that all passes use the parameters alike."""
        self.unused.set_static()
        self._end.resize()
        self.gradients.set_tail(self._end.tail_size)

    def begin_forward(self, *, sync: bool) -> Forward:
        """Begins a forward that records a graph; passes that run within it are its own.

        Args:
            sync: whether gradients are averaged; ``False`` under ``no_sync``.
        """
        if sync:
            captured = self._group.is_capturing(self._settings.device)
            if captured:
                self._end.check_capture(joining=self._uneven is not None, sparse=bool(self.gradients.sparse))
                self._was_captured = True
            self.clock.begin(self.passes, captured)
            self.rebuild_buckets()
        self._running = Forward(sync)
        return self._running

    def end_forward(self) -> None:
        """Ends a forward, also one that raised."""
        self._running = None

    def rebuild_buckets(self) -> None:
        """Lays the buckets out again where the ranks know that they should agree on the order of gradients.

        Hooks that others registered on the parameters run before the reducer's from now on.

        Called before each synchronised forward, on all ranks.
        """
        if self._hooks.reach_engine():
            self._find_accumulators()
        self._hooks.come_last()
        self._settle()
        # A graph goes on to use the buckets that it was captured with.
        if self._must_rebuild and not self._open_tasks and not self._was_captured:
            self._must_rebuild = False
            group = None if self._is_local else self._group
            before = self.gradients.layouts()
            changed = self.gradients.rebuild_buckets(self._order.agree(group, self._settings.device))
            self.has_rebuilt_buckets = True
            for listener in self.hook[::-1] if changed and self.hook is not None else ():
                tell = getattr(listener, "buckets_rebuilt", None)
                if callable(tell):
                    tell(before, self.gradients.layouts())
                    break

    def prepare_for_backward(self, forward: Forward, outputs: Iterable[torch.Tensor], training: bool) -> None:
        """Tells what the backward pass of the forward that just ran must do.

        Called at the end of each forward that records a graph. The pass begins when the engine reaches one of
        the outputs; where it reaches a parameter without that, the pass is taken for the latest forward's.

        Args:
            forward: the forward.
            outputs: tensors that it returned.
            training: whether the forward is one that all ranks run, as in training.
        """
        self._end.progress.forwards += training
        self._latest = forward
        hook = engine.OutputHook(self, forward)
        tensors = [output for output in outputs if output.requires_grad and not output.is_leaf]
        if forward.sync:
            self.unused.search_graph(forward, tensors)
        for output in tensors:
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _find_accumulators(self) -> None:
        self._accumulators.clear()
        self._accumulators.update((engine.accumulator(p), i) for i, p in enumerate(self.gradients.parameters))

    # ---- uneven inputs -----------------------------------------------------------------------------------

    def take_uneven(self, uneven: UnevenForward | None) -> None:
        """Takes what is known of the next forward within a Join; ``None`` outside of one."""
        self._uneven = uneven
        self._averager.divisor = None if uneven is None else uneven.counted

    def enter_join(self) -> None:
        """Brings the ranks in step; called by all of them when they begin to train on uneven inputs.

        What ranks did apart from each other before does not count: a forward without a backward pass, as
        before an exception, or passes under ``no_sync`` of ranks that had more inputs.
        """
        self._settle(together=True)
        self._recovery.ended = self._recovery.left_out = 0
        self.leave_join()

    def leave_join(self) -> None:
        """Counts passes anew: what ranks did apart from each other within the Join does not count."""
        self._end.progress = Progress(accumulated=self._end.progress.has_gradients())

    def retire(self) -> None:
        """Ends this reducer, which another one replaces; backward passes of its outputs reduce nothing."""
        self._hooks = self._strangers = engine.GradientHooks([])
        self._latest, self._is_retired = None, True

    def shadow_forward(self) -> None:
        """Takes part in a synchronised forward of other ranks, in place of :meth:`prepare_for_backward`."""
        forward = Forward(sync=True)
        if self.unused.search_graph(forward, ()):
            self._shadowed.append(forward)

    def shadow_backward(self) -> None:
        """Takes part in a synchronised pass of other ranks; writes the averages to ``.grad``. Blocks.

        This rank contributes what it has accumulated under ``no_sync``, else zeros. Where no rank used a
        parameter, its ``.grad`` becomes ``None``.

        Raises:
            GradientSyncError: something went wrong on a rank; raised on all ranks.
        """
        if self._is_local:
            return
        with self._lock, torch.no_grad():
            current = self._pass
            current.shadow = current.committed = True
            current.zeros_only = not self._end.progress.has_gradients()
            current.forwards, self._shadowed = self._shadowed, []
            self._latest = None
            try:
                self._begin_sync()
                self._finalize_backward(current)
            finally:
                self._reset()

    # ---- what the autograd engine calls ------------------------------------------------------------------

    def autograd_hook(self, index: int) -> None:
        """Called when the gradient of a parameter was accumulated; delayed ones are -1, -2, ..."""
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self.autograd_hook(index)
            return
        with self._lock:
            if engine.current_task() != self._task:
                self._enter_task(None)
            current = self._pass
            if index < 0:
                current.delayed |= self._delayed.note(~index)
            else:
                current.counts[index] += 1
                if current.sync:
                    current.ready_order.append(index)
                    if self.unused.note_gradient(current, index):
                        self._mark_ready(current, index)
            drained = self._next == len(self.gradients.buckets) and not current.broken_off
            if self._delayed.is_ready and (drained or not current.sync):
                self._delayed.launch()  # after the buckets, in whatever order gradients come

    def stranger_hook(self, name: str) -> None:
        """Called when the gradient of a parameter was accumulated that nobody averages."""
        with self._lock:
            if engine.current_task() != self._task:
                self._enter_task(None)
            if self._pass.sync:
                self._pass.committed = True
                self._pass.strangers[name] = None

    def output_hook(self, forward: Forward) -> None:
        """Called when the gradient of an output of forward was computed.

        It may be the beginning of ``torch.autograd.grad``, which accumulates nothing: such a task leaves no
        trace.
        """
        if self._is_retired:
            return
        with self._lock:
            current = self._pass
            if forward not in current.forwards:  # before the pass begins with what its forwards reach
                current.forwards.append(forward)
            if engine.current_task() != self._task:
                self._enter_task(forward)
            if not forward.sync:
                return
            if not current.sync:
                self._begin_sync()
            if not current.committed:
                reaches = any(map(engine.will_accumulate, self._accumulators))
                current.committed = reaches or engine.runs_backward()
            if not current.committed and engine.runs_dist_backward():
                current.committed = True  # at the end of the pass: an error raised here would lose its words
                current.report.errors.append(engine.DIST_AUTOGRAD_ERROR)

    def end_task(self, task: int) -> None:
        """Called when a task is complete; what is raised here, ``backward()`` raises."""
        with self._lock:
            current = self._close_task(task)
            if current is None:
                return
            try:
                if not current.took_part():
                    return
                self.unused.add(current.counts)
                with torch.no_grad():
                    if current.sync:
                        self._latest = None
                        self._finalize_backward(current)
                    elif current.forwards:
                        self._end.progress.unsynced += 1
                    self._delayed.finish()
            finally:
                self._reset()

    def fail_task(self, task: int) -> None:
        """Called when an exception broke a task off."""
        with self._lock:
            current = self._close_task(task)
            if current is None:
                return
            try:
                if current.took_part() and not current.broken:
                    self._latest = None if current.sync else self._latest
                    with torch.no_grad(), contextlib.suppress(Exception):
                        self._abandon(current)
                if current.told is None:
                    self._recovery.owe(current.report)
                if current.broken_off:
                    self._let_go()
            finally:
                self._reset()

    def _close_task(self, task: int) -> BackwardPass | None:
        """Takes note that a task has ended; returns the pass where it was the outermost one."""
        self._open_tasks.discard(task)
        self._task = engine.NO_TASK
        return None if self._open_tasks else self._pass

    # ---- passes ------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Ends the pass."""
        if self._pass.sync:
            self._recovery.end_pass()
            if self._pass.took_part():
                self._recovery.ended += 1
                self._end.progress = Progress()
                for forward in self._pass.forwards:
                    forward.averaged = True
                self.unused.clear()
            self._reset_buckets()
        self._abandoned += self._delayed.reset()
        self._open_tasks.clear()
        self._task = engine.NO_TASK
        if self._casts is not None and self._pass.casts_active:
            self._casts.leave()
            if self._pass.took_part():
                self._casts.forget()
        self._pass = BackwardPass([0] * (count := len(self.gradients)), ErrorReport(count), self.unused.used)

    def _reset_buckets(self) -> None:
        """Begins or ends a synchronised pass."""
        self._next = 0
        self.gradients.reset()
        if self._sparse is not None:
            self._sparse.reset()

    def _enter_task(self, forward: Forward | None) -> None:
        """Takes note that hooks now run in another task than before; the first task of all begins a pass."""
        task = engine.current_task()
        if task not in self._open_tasks:
            begins = not self._open_tasks
            if engine.runs_compiled():
                raise RuntimeError(
                    f"[rank {self._group.rank()}] {self._settings.model}: {engine.COMPILED_ERROR}"
                )
            engine.TaskGuard(self, task)
            self._open_tasks.add(task)
            self._pass.nested = not begins
            if begins:
                self._wait_for_abandoned()
                if self._casts is not None:
                    self._casts.enter()
                    self._pass.casts_active = True
                if forward is None and self._running is not None:
                    forward = self._running
                    self._pass.forwards.append(forward)
                forward = forward or self._latest
                if forward is not None and forward.sync:
                    self._begin_sync()
        self._task = task

    @torch.no_grad()
    def _begin_sync(self) -> None:
        """Makes the pass a synchronised one; takes the gradients that came before.

        Blocks where the ranks' searches of their graphs have no results yet.
        """
        self._settle()
        current = self._pass
        current.sync = True
        self._recovery.begin_pass(by_hook=self.hook is not None and not self._is_local)
        current.uneven = self._uneven
        self.clock.mark(Mark.BACKWARD_BEGIN)
        self._reset_buckets()
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if unfrozen:
            current.report.errors.append(
                f"{', '.join(unfrozen)} needed no gradient when the module was wrapped, but need one now; "
                f"{_WRAP_AGAIN}"
            )
        if converted := self._kinds.changes():
            current.report.faults[CONVERTED] = converted
        everywhere, here = self.unused.unreachable(current.forwards)
        current.unused.update(here)
        # Large ones are left out singly where no hook reduces.
        current.skipped = self.gradients.leave_out(everywhere, singly=self.hook is None)
        self._mark_unused(current, current.unused.difference(current.skipped))
        current.unused.update(current.skipped)
        for index, count in enumerate(current.counts):
            if count:
                current.ready_order.append(index)
                if self.unused.note_gradient(current, index):
                    self._mark_ready(current, index)

    def _abandon(self, current: BackwardPass) -> None:
        """Gives the peers of a pass that broke off here what they wait for, and the report."""
        current.abandoned = True
        current.report.errors.append(
            "its backward pass was broken off by an exception, which is raised there"
        )
        communicates = current.sync and not self._is_local
        if communicates:
            for bucket in self.gradients.buckets:
                bucket.release_grads()
            self._launch_ready(current)
        if current.broken_off:
            return
        if communicates:
            self._abandoned += [
                handle for b in self.gradients.buckets if (handle := b.work or b.future) is not None
            ]
        self._delayed.launch(zeros=True)
        if communicates:
            self._abandoned += self._end.abandon(current)

    def _settle(self, *, together: bool = False) -> None:
        """Raises what went wrong on other ranks in earlier passes, where that is deferred."""
        self._wait_for_abandoned()
        self._recovery.check_next()
        try:
            # All ranks lay their buckets out again after the first pass, which blocks anyway.
            first = self._must_rebuild and not self._was_captured
            self._must_rebuild |= self._end.settle(together=together or first)
        except DistError as error:
            self.passes -= 1  # as on the rank that raised in that pass
            self._must_rebuild = False
            explained = self.explain(error)
            if explained is error:
                self._recovery.ended += 1
            raise explained from error.__cause__

    def _wait_for_abandoned(self) -> None:
        """Waits for what an abandoned pass has issued; its error was raised then."""
        abandoned, self._abandoned = self._abandoned, []
        for handle in abandoned:
            with contextlib.suppress(Exception):
                handle.wait()
        owed, self._recovery.owed = self._recovery.owed, None
        if owed is not None and self._recovery.is_broken_off():
            self._recovery.meet(self._settings, owed, after=True)

    def explain(self, error: DistError) -> DistError:
        """Returns the error of a pass that a hook's failure broke off, for what came of it here, or that one.

        Blocks until all ranks have come.
        """
        if isinstance(error, GradientSyncError) or not self._recovery.is_broken_off():
            return error
        error = self._recovery.meet(self._settings, self._recovery.owed or ErrorReport(), after=False)
        self._recovery.ended += 1
        return error

    def iteration(self) -> int:
        """Returns what the state of the hook counts, as those of torch's hooks and ours do."""
        count = None if self.hook is None else getattr(self.hook[1], "iter", None)
        return count if type(count) is int else 0

    def let_go(self, error: GradientSyncError) -> None:
        """Forgets what was under way when a pass over the group was broken off, of this model or another.

        Args:
            error: what this model's pass raises where one goes on.
        """
        if self._is_local:
            return
        if self._pass.sync:
            self._pass.broken_off, self._pass.told = True, error
        self._let_go()
        self._end.begin_anew()

    def begin_anew(self, passes: int, iteration: int) -> None:
        """Takes over what the ranks have in common after that; called by all of them.

        Args:
            passes: number of passes that ended well on all ranks.
            iteration: what the state of the hook counts from now on.
        """
        if self._is_local:
            return
        self.passes = passes
        self._must_rebuild = False
        if self.hook is None:
            return
        hook, state = self.hook
        if type(getattr(state, "iter", None)) is int:
            state.iter = iteration
        for listener in (hook, state):
            tell = getattr(listener, "pass_failed", None)
            if callable(tell):
                tell()

    # ---- launching buckets ---------------------------------------------------------------------------------

    def _mark_ready(self, current: BackwardPass, index: int) -> None:
        """Takes a gradient to which nothing will be added; launches the buckets that are full by it."""
        gradient = self.gradients[index]
        if gradient.comes_early and (bad := gradient.copy_early()):
            current.report.errors.append(bad)
        if self._count(index) and not current.ending:
            self._launch_ready(current)

    def _mark_unused(self, current: BackwardPass, indices: Iterable[int]) -> None:
        """Takes something else for parameters to which this pass gives no gradient; launches nothing."""
        for index in indices:
            current.unused.add(index)
            if index in self.gradients.bucket_of:
                bucket, gradient = self.gradients.bucket_of[index], self.gradients[index]
                if bad := bucket.fill_unused(gradient, zeros_only=current.zeros_only):
                    current.report.errors.append(bad)
            self._count(index)

    def _count(self, index: int) -> bool:
        """Counts one more gradient as ready; returns whether its bucket is full by it."""
        bucket = self.gradients.bucket_of.get(index)
        if bucket is not None:
            return bucket.mark_ready()
        if self._sparse is not None:
            self._sparse.pending -= 1
            return not self._sparse.pending
        return False

    def _launch_ready(self, current: BackwardPass) -> None:
        """Launches full buckets in order, up to the first that is not full (Fig. 3(a) of the paper).

        The last one carries the signals. Of an abandoned pass, all others are launched with zeros. Of one
        that a hook's failure broke off, none is.
        """
        if current.broken_off:
            return
        try:
            self._launch(current)
        except DistError:
            if not self._recovery.is_broken_off():
                raise
            current.broken_off, current.broken = True, False

    def _launch(self, current: BackwardPass) -> None:
        buckets, sparse = self.gradients.buckets, self._sparse
        # Nested tasks may yet bring a gradient again; the signals that tell so leave with the last bucket,
        # and so do those about sparse gradients.
        early = not current.ending and (current.nested or bool(self._strangers))
        early = early or (sparse is not None and sparse.pending > 0)
        end = len(buckets) - (early and not current.abandoned)
        while self._next < end and not current.broken_off:
            bucket = buckets[self._next]
            if bucket.pending and not current.abandoned:
                return
            announce = None if current.uneven is None or self._next else current.uneven.announce
            if announce is not None and not self._is_local:
                try:
                    announce()
                except BaseException:
                    current.broken = True
                    raise
            if not bucket.skipped and current.abandoned:
                bucket.fill_with_zeros()
            elif not bucket.skipped:
                current.report.errors += bucket.fill(current.unused)
            if bucket.tail is not None and sparse is not None and not self._is_local:
                unused = {index for index in current.unused if not current.used_before[index]}
                sparse.announce(unused, error=bool(current.report), zeros_only=current.zeros_only)
            self._next += 1
            self.clock.mark(Mark.COMMUNICATION_BEGIN)
            try:
                if self.hook is None:
                    if bucket.tail is not None:
                        self._end.write_signals(current, bucket.tail)
                    tensors = bucket.tensors()
                    bucket.work = self._averager.start(tensors) if tensors else None
                elif bucket.indices and not bucket.skipped:
                    self._run_hook(current, *self.hook, bucket)
            except BaseException:
                current.broken = True
                raise

    def _run_hook(self, current: BackwardPass, hook: Hook, state: Any, bucket: Bucket) -> None:
        """Calls the hook; where it fails, that is reported and the pass broken off, so that no peer waits."""
        later = self.gradients.buckets[bucket.index + 1 :]
        last = not any(other.indices and not other.skipped for other in later)
        try:
            future: Any = hook(state, GradBucket(bucket, last=last))
            if not issubclass(type(future), torch._C.Future):
                raise TypeError(
                    "the communication hook must return a torch.futures.Future of a tensor, but returned "
                    f"a value of type {type(future).__name__} for bucket {bucket.index}"
                )
        except BaseException as error:
            self._hook_failed(current, bucket, error)
            if not isinstance(error, Exception):
                raise
        else:
            bucket.future = future

    def _hook_failed(self, current: BackwardPass, bucket: Bucket, error: BaseException) -> None:
        """Reports a failure of the hook, unless it comes of another rank's; the pass is to be left.

        Raises:
            DistError: the failure, where something else broke the group.
        """
        if self._recovery.is_broken_off():
            current.broken_off = True
            if self._recovery.comes_of_it(error):
                return
        elif not self._is_local and (broken := self._group._first_cause()) is not None:
            raise error if isinstance(error, DistError) else broken from error
        names = bucket.names
        few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        hook = self.hook[0] if self.hook else None
        name = getattr(hook, "__name__", type(hook).__name__)
        why = f"its communication hook {name} failed on bucket {bucket.index} ({few})"
        current.report.errors.append(f"{why}: {type(error).__name__}: {error}")
        current.report.cause = current.report.cause or error
        if not self._is_local:
            current.broken_off = True
            self._recovery.hook_failed(why, error, ending=current.ending)

    # ---- end of a synchronised pass ----------------------------------------------------------------------

    def _finalize_backward(self, current: BackwardPass) -> None:
        """Ends a synchronised pass, or brings the ranks together where a hook's failure broke it off."""
        try:
            self._finish_pass(current)
        except DistError as error:
            if isinstance(error, GradientSyncError) or not self._recovery.is_broken_off():
                raise
            current.broken_off = True
        if current.told is not None:
            raise current.told
        if current.broken_off:
            report = current.report
            if self._end.defers(current):
                raise self._recovery.leave(self._settings, report) from report.cause
            raise self._recovery.meet(self._settings, report, after=False) from report.cause

    def _finish_pass(self, current: BackwardPass) -> None:
        """Gives the peers what is still owed, waits, writes ``.grad``, asks whether all ranks are well."""
        current.ending = True
        self.clock.mark(Mark.BACKWARD_END)
        for index in self.unused.incomplete(current):
            if current.counts[index]:
                self._mark_ready(current, index)
            else:
                self._mark_unused(current, [index])
        if current.strangers:  # for which others are missing
            current.report.errors.append(
                f"{', '.join(current.strangers)} got a gradient, but came into the module after it was "
                "wrapped, as by setattr, load_state_dict(assign=True) or weight_norm, so that nobody "
                f"averages it; {_WRAP_AGAIN}"
            )
        else:
            self.unused.report_missing(current)
        self._launch_ready(current)
        if not current.broken_off:
            self._delayed.launch()
            self._wait_for_hook(current)
        if current.broken_off:
            return
        self._end.send_signals(current)
        tail = self.gradients.buckets[-1].tail
        # Where a hook reduces, signals tell of it before: gradients of a bad pass stay as they are.
        signals = None if self.hook is None else self._end.read_signals(current, tail)
        self._finalize(current)
        timed = self.clock.end()
        signals = signals or self._end.read_signals(current, tail)
        globally_unused = self.unused.globally_unused(current, signals.unused)
        for index in current.unused:
            gradient = self.gradients[index]
            if index in self.gradients.bucket_of:  # else it is sparse, and averaged as it is
                used = index not in globally_unused
                self.gradients.bucket_of[index].finalize_unused(gradient, used=used)
            if current.zeros_only and index in globally_unused:  # as on ranks that zeroed their gradients
                gradient.parameter.grad = None
        self._must_rebuild = signals.relayout or not self.passes
        self.unused.note(current, signals.unused)
        if not current.shadow:
            self._order.note(current.ready_order)
        self.passes += 1
        if timed:
            self.clock.log(self._group, f"{self._settings.model}, iteration {self.passes}")

    def _wait_for_hook(self, current: BackwardPass) -> None:
        """Waits for what the communication hook returned, where there is one, and reports what is wrong.

        Raises:
            DistError: a collective operation of the hook failed, because something broke the group.
        """
        for bucket in self.gradients.buckets if self.hook is not None else ():
            if current.broken_off:  # nobody may complete the others
                return
            try:
                bucket.wait()
            except BaseException as error:
                self._hook_failed(current, bucket, error)
                if not isinstance(error, Exception):
                    raise

    def _finalize(self, current: BackwardPass) -> None:
        """Waits for all reductions and writes the averages to ``.grad``, where all is well so far.

        Raises:
            Exception: what the first reduction that failed, failed with; all have ended then.
        """
        failure: Exception | None = None
        self._left.clear()
        if self._sparse is not None:
            self._sparse.exchange()
        for bucket in self.gradients.buckets:
            try:
                bucket.wait()
                divisor = self._averager.divisor
                if bucket.future is not None and divisor is not None and not self._is_local:
                    bucket.buffer.mul_(self._group.size() / divisor)  # of the hook's mean over all ranks
                if failure is None and not current.report:
                    bucket.finalize(current.unused)
            except Exception as error:  # noqa: BLE001, PERF203 - raised below, after the others ended
                failure = failure or error
        if failure is not None:
            raise failure
        if self._sparse is not None:
            self._sparse.finish()

    def _let_go(self) -> None:
        """Takes other buckets after a pass that was broken off; the old ones stay while they may be written.

        MPI cannot call off what is in flight, and futures of the hook may yet write their results. Nobody has
        those of a call that failed; on a device, what they write may come after all that this rank waits for.
        """
        devices = {b.flat.device for b in self.gradients.buckets if b.flat.is_cuda}
        for device in devices:
            torch.cuda.synchronize(device)
        self._left += [(b.future, b.flat) for b in self.gradients.buckets if b.future is not None]
        self._left = [(future, flat) for future, flat in self._left if not _is_done(future)]
        self.gradients.renew_buckets()


def _is_done(future: Future[Any]) -> bool:
    """Returns whether a future is complete; lets the current stream wait for its value then."""
    done = future.done()
    if done:
        with contextlib.suppress(Exception):
            future.wait()
    return done
