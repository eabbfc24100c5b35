"""The reducer: averages gradients over all ranks while the backward pass computes them.

Words used here. A *task* is one run of the autograd engine; a task within a task (reentrant activation
checkpointing) is *nested*. A *pass* is one backward pass of the user: the outermost task with those nested in
it. A pass is *synchronised* where a forward that it belongs to ran outside ``no_sync``.

Algorithm 1 of PyTorch Distributed (VLDB 2020, section 3.2): one hook for each parameter puts the gradient
into its bucket; full buckets are reduced asynchronously, strictly in the order of the buckets, which is the
same on all ranks; the pass ends with a wait for all of them. Unlike there, the graph is never walked: what
is absent from the pass is what the engine has not delivered when it ends.

The life of a pass: the first hook that runs begins it (:meth:`Reducer._enter_task`); a synchronised one takes
gradients (:meth:`Reducer._gradient_came`) and launches buckets (:mod:`collectives.ddp.launcher`); at the end
of the outermost task it is finished (:meth:`Reducer._finish`), or abandoned where an exception broke it off.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from collectives import ProcessGroup
from collectives.ddp.averaging import Averager
from collectives.ddp.engine import (
    NO_TASK,
    OutputHook,
    TaskGuard,
    accumulator,
    current_task,
    gradient_hook,
    runs_backward,
    will_accumulate,
)
from collectives.ddp.gradients import BadGradientError, Gradients
from collectives.ddp.launcher import Hook, Launcher
from collectives.ddp.options import ReducerOptions
from collectives.ddp.order import OrderTrace, agree_on_order
from collectives.ddp.passes import Forward, Pass, Progress
from collectives.ddp.reach import ReachExchange, reached_from
from collectives.ddp.signals import Heard, SignalExchange, Signals
from collectives.ddp.sparse import SparseGradients
from collectives.ddp.timing import STATISTICS_LEVEL, IterationClock, Mark
from collectives.ddp.verdict import Report, ReportExchange, sync_error

__all__ = ["Hook", "Reducer"]

Waitable = Any

_log = logging.getLogger(__name__)

_ELSEWHERE = -1
"""Stands for the index of a parameter that is not the model's."""


class Reducer:
    """Averages the gradients of some parameters over a group, in place, at every synchronised pass.

    All ranks make one with the same parameters in the same order. It holds hooks on the parameters until it
    is deleted or closed; they hold it weakly.

    Attributes:
        gradients: the gradients and their buckets.
        passes: number of synchronised passes that ended well.
        same_usage: whether all of them used the parameters alike.
        initial_bucket_bytes: sizes of the buckets before the first pass.
        has_rebuilt_buckets: whether the ranks have agreed on the order of the gradients.
        clock: times of the iterations.

    Args:
        parameters: parameters that need gradients, by name.
        group: the ranks.
        options: the options.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], group: ProcessGroup, options: ReducerOptions
    ) -> None:
        self._group = group
        self._model = options.model
        self._find_unused = options.find_unused_parameters or options.skip_unused
        self._skip_unused = options.skip_unused
        self._static = options.static_graph
        self._frozen = options.frozen
        self._casts = options.casts
        self._averager = Averager(group)
        for parameter in parameters.values():
            real = parameter.is_floating_point() and options.wire_dtype
            self._averager.check(real or parameter.dtype, parameter.device)
        counted = self._find_unused or self._static
        self._signals = Signals(len(parameters) if counted else 0)
        places = {id(parameter): index for index, parameter in enumerate(parameters.values())}
        self._trigger = None if options.trigger is None else places.get(id(options.trigger), _ELSEWHERE)
        self.gradients = Gradients(
            parameters,
            options.limits,
            tail=self._signals.size,
            as_views=options.gradient_as_bucket_view,
            batched=options.batched_grad_copy,
            sparse=[index for index, name in enumerate(parameters) if name in options.sparse],
            delayed=[index for index, name in enumerate(parameters) if name in options.delayed],
            trigger=self._trigger,
            wire_dtype=options.wire_dtype,
        )
        self._device = self.gradients.parameters[0].device
        self.clock = IterationClock(self._device)
        rows = {index: self.gradients.parameters[index] for index in self.gradients.sparse}
        self._launcher = Launcher(
            self.gradients,
            self._averager,
            SparseGradients(rows, self._averager, self._device) if rows else None,
        )
        self._launcher.clock = self.clock
        self.initial_bucket_bytes = [bucket.nbytes for bucket in self.gradients.buckets]
        self._lock = threading.RLock()
        self._exchange: SignalExchange | None = None  # where the buckets cannot carry the signals

        # How often each gradient comes in a pass; None before the first pass of a static graph has ended.
        self._expected: list[int] | None = None if self._static else [1] * len(parameters)
        self._idle: list[int] = []  # parameters of a static graph that never get a gradient here
        self._unused_everywhere: Collection[int] = ()  # ... and on no other rank
        self._used = [0] * len(parameters)  # adds up over passes under no_sync

        self.passes = 0
        self.same_usage = True
        self.has_rebuilt_buckets = False
        self._order = OrderTrace(range(len(parameters) - 1, -1, -1))
        self._must_agree = False
        self._last_counts: list[int] = []
        self._latest: Forward | None = None
        self._ahead: list[Forward] = []  # forwards with a walked graph and no synchronised pass yet
        self._progress = Progress()
        self._stale: list[Waitable] = []
        self._open: set[int] = set()
        self._task = NO_TASK
        self._pass = Pass([], Report(), ())
        self._reset()

        nodes = [accumulator(parameter) for parameter in self.gradients.parameters]
        self._accumulators = {node: index for index, node in enumerate(nodes)}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(gradient_hook(self, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.gradients.parameters)
        ]
        if options.trigger is not None and self._trigger == _ELSEWHERE:
            hook = gradient_hook(self, _ELSEWHERE)
            self._handles.append(options.trigger.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    def close(self) -> None:
        """Removes the hooks from the parameters; idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    # ---- what the module calls ---------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is going on."""
        return bool(self._open)

    @property
    def unused_bytes(self) -> int:
        """Size of the gradients that were absent on this rank from the last synchronised pass."""
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter, count in zip(self.gradients.parameters, self._last_counts, strict=False)
            if not count
        )

    @property
    def ready_order(self) -> list[int]:
        """Indices of the parameters in the order of their gradients in the last pass that ended well."""
        return self._order.latest if self.passes else []

    def register_hook(self, state: object, hook: Hook, *, is_local: bool) -> None:
        """Hands the reduction of full buckets to a communication hook."""
        self._launcher.hook = hook, state
        self._launcher.is_local = is_local
        self.gradients.pack_all()
        self._exchange = None if is_local else SignalExchange(self._averager, self._signals, self._device)

    def set_static_graph(self) -> None:
        """Promises from now on that all passes use the parameters alike."""
        self._static = True
        self._expected = None
        self._signals = Signals(len(self.gradients))
        self.gradients.set_tail(self._signals.size)
        if self._exchange is not None:
            self._exchange = SignalExchange(self._averager, self._signals, self._device)

    def before_forward(self) -> None:
        """Lays the buckets out again where the ranks know that they should agree on the order of gradients.

        Called before each synchronised forward, on all ranks.
        """
        self._settle()
        if not self._must_agree or self._open:
            return
        self._must_agree = False
        if self._launcher.is_local:
            order = self._order.latest
        else:
            order = agree_on_order(self._group, self._order.latest, self._device)
        self._order.agreed()
        self.has_rebuilt_buckets = True
        self._launcher.lay_out(order)

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor], sync: bool, *, training: bool) -> None:
        """Tells what the backward pass of the forward that just ran must do.

        Called at the end of each forward that records a graph. The pass begins when the engine reaches one of
        the outputs; where it reaches a parameter without that, the pass is taken for the latest forward's.

        Args:
            outputs: tensors that the forward returned.
            sync: whether gradients are averaged; ``False`` under ``no_sync``.
            training: whether the forward is one that all ranks run, as in training.
        """
        self._progress.forwards += training
        self._latest = forward = Forward(sync)
        hook = OutputHook(self, forward)
        tensors = [output for output in outputs if output.requires_grad and not output.is_leaf]
        if sync and self._walks():
            reached = reached_from(tensors, self._accumulators)
            mine = [bool(used) or index in reached for index, used in enumerate(self._used)]
            forward.reach = ReachExchange(self._group, mine, self._device)
            self._ahead.append(forward)
        for output in tensors:
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _walks(self) -> bool:
        """Returns whether the graph is walked to find what no rank reaches."""
        return self._skip_unused and not self._static and not self._launcher.is_local

    # ---- what the autograd engine calls ------------------------------------------------------------------

    def autograd_hook(self, index: int) -> None:
        """Called when the gradient of a parameter was accumulated in ``.grad``."""
        with self._lock:
            if current_task() != self._task:
                self._enter_task(None)
            current = self._pass
            if index == self._trigger:
                current.triggered = True
                if index == _ELSEWHERE:
                    if current.sync:
                        self._launcher.launch_full(current)
                    return
            count = current.counts[index] + 1
            current.counts[index] = count
            if current.sync:
                self._gradient_came(current, index, count)

    def output_hook(self, forward: Forward) -> None:
        """Called when the gradient of an output of forward was computed.

        It may be the beginning of ``torch.autograd.grad``, which accumulates nothing: such a task leaves no
        trace.
        """
        with self._lock:
            if current_task() != self._task:
                self._enter_task(forward)
            current = self._pass
            if forward not in current.forwards:
                current.forwards.append(forward)
            if not forward.sync:
                return
            if not current.sync:
                self._begin_sync()
            if not current.committed:
                current.committed = any(map(will_accumulate, self._accumulators)) or runs_backward()

    def end_task(self, task: int) -> None:
        """Called when a task is complete; what is raised here, ``backward()`` raises."""
        with self._lock:
            self._open.discard(task)
            self._task = NO_TASK
            if self._open:
                return
            current = self._pass
            try:
                if not current.took_part():
                    return
                if self._counts_usage():
                    self._used = [int(u or c > 0) for u, c in zip(self._used, current.counts, strict=True)]
                if current.sync:
                    self._latest = None
                    with torch.no_grad():
                        self._finish(current)
                elif current.forwards:
                    self._progress.unsynced += 1
            finally:
                self._reset()

    def fail_task(self, task: int) -> None:
        """Called when an exception broke a task off."""
        with self._lock:
            self._open.discard(task)
            self._task = NO_TASK
            if self._open:
                return
            current = self._pass
            try:
                if current.sync and current.took_part() and not current.broken:
                    self._latest = None
                    with torch.no_grad(), contextlib.suppress(Exception):
                        self._abandon(current)
            finally:
                self._reset()

    # ---- passes ------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Ends the pass."""
        if self._pass.sync:
            if self._pass.took_part():
                self._used = [0] * len(self._used)
                self._progress = Progress()
                for forward in self._pass.forwards:
                    forward.averaged = True
                self._ahead = [forward for forward in self._ahead if not forward.averaged]
            self._launcher.end()
        self._open.clear()
        self._task = NO_TASK
        if self._casts is not None and self._pass.entered:
            self._casts.leave()
            if self._pass.took_part():
                self._casts.forget()
        count = len(self.gradients)
        self._pass = Pass([0] * count, Report(total=count), self._used)

    def _enter_task(self, forward: Forward | None) -> None:
        """Notes that hooks now run in another task than before; the first task of all begins a pass."""
        task = current_task()
        if task not in self._open:
            begins = not self._open
            TaskGuard(self, task)
            self._open.add(task)
            self._pass.nested = not begins
            if begins:
                self._settle()
                if self._casts is not None:
                    self._casts.enter()
                    self._pass.entered = True
                forward = forward or self._latest
                if forward is not None and forward.sync:
                    self._begin_sync()
        self._task = task

    def _begin_sync(self) -> None:
        """Makes the pass a synchronised one; gradients that came before are taken now."""
        current = self._pass
        current.sync = True
        self.clock.mark(Mark.BACKWARD_BEGIN)
        self._launcher.begin(self._fill_tail)
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            current.report.errors.append(
                f"{', '.join(thawed)} needed no gradient when the module was wrapped, but need one now; wrap "
                "the module again after such a change"
            )
        self._skip_what_none_reaches(current)
        for index in self._idle:
            if index not in current.skipped:
                self._collect_absent(current, index)
        for index, count in enumerate(current.counts):
            if count:
                self._gradient_came(current, index, count)

    def _skip_what_none_reaches(self, current: Pass) -> None:
        """Leaves out the buckets that no rank can fill; takes what this rank cannot reach as absent."""
        if not self._skip_unused:
            return
        unreached: Collection[int] = self._unused_everywhere
        mine: Sequence[bool] = ()
        if self._walks():
            exchanges = [f.reach for f in {*self._ahead, *current.forwards} if f.reach is not None]
            everyone = [exchange.anyone() for exchange in exchanges]
            unreached = {index for index in range(len(self.gradients)) if not any(e[index] for e in everyone)}
            mine = [any(e.mine[index] for e in exchanges) for index in range(len(self.gradients))]
        current.skipped = self._launcher.skip(frozenset(unreached))
        current.absent |= current.skipped
        for index, reached in enumerate(mine):
            if not reached and index not in current.skipped and not self._used[index]:
                self._collect_absent(current, index)

    def _counts_usage(self) -> bool:
        """Returns whether the ranks tell each other which parameters they gave a gradient."""
        return self._find_unused or self._expected is None

    def _fill_tail(self, current: Pass, tail: torch.Tensor) -> None:
        """Writes this rank's signals."""
        used: Sequence[int] | None = None
        if self._counts_usage() and not all(self._used):
            used = [int(u or c > 0) for u, c in zip(self._used, current.counts, strict=True)]
        self._signals.fill(
            tail,
            trouble=bool(current.report),
            wish=self._order.wish,
            position=current.position(self._progress),
            used=used,
        )

    def _start_exchange(self, current: Pass) -> None:
        if self._exchange is not None:
            self._fill_tail(current, self._exchange.tail)
            self._exchange.start()

    def _abandon(self, current: Pass) -> None:
        """Gives the peers of a pass that broke off here what they wait for, and the report."""
        current.report.errors.append(
            "its backward pass was broken off by an exception, which is raised there"
        )
        if self._launcher.is_local:
            return
        self._launcher.abandon(current)
        self._start_exchange(current)
        if self._exchange is not None:
            self._stale.append(self._exchange)
        self._stale.append(ReportExchange(self._group, current.report, self._device))

    def _settle(self) -> None:
        """Waits for what a pass that broke off has issued; its error was raised then."""
        self._launcher.settle()
        stale, self._stale = self._stale, []
        for item in stale:
            with contextlib.suppress(Exception):
                item.wait()

    # ---- gradients ---------------------------------------------------------------------------------------

    def _gradient_came(self, current: Pass, index: int, count: int) -> None:
        current.came.append(index)
        expected = self._expected
        if index in current.absent and self._walks():
            current.report.errors.append(
                f"{self.gradients.names[index]} got a gradient, but nothing that forward returned depends on "
                "it, so that it was skipped; leave out skip_all_reduce_unused_params"
            )
            return
        if expected is None:
            return
        if count != expected[index]:
            if count == expected[index] + 1:
                names = current.report.changed if self._static else current.report.repeated
                names.append(self.gradients.names[index])
            return
        self._take(current, index)

    def _take(self, current: Pass, index: int) -> None:
        """Takes a gradient of which nothing more will come; launches its bucket where that is full now."""
        try:
            if torch.is_grad_enabled():  # backward(create_graph=True)
                with torch.no_grad():
                    self.gradients.came(index)
            else:
                self.gradients.came(index)
        except BadGradientError as error:
            current.report.errors.append(str(error))
        if self._launcher.mark_ready(index) and not current.ending:
            self._launcher.launch_full(current)

    def _collect_absent(self, current: Pass, index: int) -> None:
        current.absent.add(index)
        try:
            with torch.no_grad():
                self.gradients.collect_absent(index)
        except BadGradientError as error:
            current.report.errors.append(str(error))
        self._launcher.mark_ready(index)

    # ---- end of a synchronised pass ----------------------------------------------------------------------

    def _finish(self, current: Pass) -> None:
        """Gives the peers what is still owed, waits, writes ``.grad``, asks whether all ranks are well."""
        current.ending = True
        self.clock.mark(Mark.BACKWARD_END)
        self._complete(current)
        self._launcher.launch_full(current)
        self._start_exchange(current)
        self._launcher.finish(current)
        timed = self.clock.end()
        heard = self._verdict(current)
        unused = heard.unused if self._counts_usage() else self._unused_everywhere
        unused = {*unused, *current.skipped}
        for index in current.absent:
            self.gradients.deliver_absent(index, used=index not in unused)
        if self._expected is None:
            self._expected = list(current.counts)
            self._idle = [index for index, count in enumerate(current.counts) if not count]
            self._unused_everywhere = heard.unused
        self._note_good_pass(current, heard)
        if timed:
            self._log_times()

    def _log_times(self) -> None:
        if _log.isEnabledFor(STATISTICS_LEVEL) and (latest := self.clock.latest()) is not None:
            _log.log(
                STATISTICS_LEVEL, "[rank %d] %s, iteration %d: %s",
                self._group.rank(), self._model, self.passes, latest[0],
            )  # fmt: skip

    def _complete(self, current: Pass) -> None:
        """Collects what the hooks did not, and reports what should not be absent."""
        counts, expected, names = current.counts, self._expected, self.gradients.names
        if counts == expected:
            return
        for index, count in enumerate(counts):
            if expected is not None and count >= expected[index]:
                continue
            if index in current.absent:
                continue
            if count:
                self._take(current, index)
            else:
                self._collect_absent(current, index)
        if not self._static and not self._find_unused:
            current.report.missing = [name for name, count in zip(names, counts, strict=True) if not count]
            parameters = zip(names, self.gradients.parameters, strict=True)
            frozen = [name for name, parameter in parameters if not parameter.requires_grad]
            if frozen:
                current.report.errors.append(
                    f"{', '.join(frozen)} needed a gradient when the module was wrapped, but need none now"
                )
        elif self._static and expected is not None:
            current.report.changed = [
                name for name, count, before in zip(names, counts, expected, strict=True) if count != before
            ]

    def _verdict(self, current: Pass) -> Heard:
        """Returns what the ranks signalled.

        Raises:
            GradientSyncError: a rank is in trouble; raised on all ranks.
        """
        tail = self.gradients.buckets[-1].tail
        if self._launcher.is_local or tail is None:
            heard = self._signals.alone(self._used if self._counts_usage() else ())
        else:
            if self._exchange is not None:
                self._exchange.wait()
                tail = self._exchange.tail
            heard = self._signals.read(tail)
        if heard.out_of_step:
            current.report.position = str(current.position(self._progress))
        if heard.trouble or heard.out_of_step:
            raise ReportExchange(self._group, current.report, self._device).error(self._model)
        if current.report:  # only this rank knows: nothing communicates, or the signals had left already
            raise sync_error(self._group, self._model, {self._group.rank(): current.report.encode()})
        return heard

    def _note_good_pass(self, current: Pass, heard: Heard) -> None:
        if self.passes:
            self.same_usage = self.same_usage and current.counts == self._last_counts
        self._must_agree = heard.wish or not self.passes
        self._order.note(current.came)
        self._last_counts = current.counts
        self.passes += 1
