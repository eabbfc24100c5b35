"""Several groups as one: successive collectives go to successive groups.

One group runs its collectives one after another, on one thread or stream and over one set of connections.
Several groups of the same ranks, used in turn, run several at the same time (PyTorch Distributed, VLDB 2020,
sections 3.3 and 5.4).
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
from torch.futures import Future

from collectives import ProcessGroup, Work
from collectives.backends._shared.exit_reasons import refuse_broken
from collectives.core.arguments.option_records import BackendOptions
from collectives.core.capabilities import Capabilities, by_device, in_common
from collectives.core.forwarding import ForwardingGroup
from collectives.core.operations import BARRIER, Call
from collectives.core.work import CoalescedWork, CompletedWork, WrappedWork, chain, settle, take_future
from collectives.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistError,
    GroupAbortedError,
    PeerLostError,
)
from collectives.registry.backends import (
    GroupOptions,
    backend_spec,
    capabilities_of,
    create_group,
    decline_group,
)
from collectives.store import PrefixStore
from collectives.store.joining.meeting_place import Members
from collectives.time_limits import left_until, seconds_to_wait

_LANES = "COLLECTIVES_ROUND_ROBIN_LANES"
_BACKEND = "COLLECTIVES_ROUND_ROBIN_BACKEND"


@dataclass(frozen=True, slots=True)
class RoundRobinOptions(BackendOptions):
    """Options of the round_robin backend, given as ``pg_options``; the same on every rank.

    Attributes:
        lanes: number of groups, at least 1.
        backend: backend of every one; any but ``"round_robin"``. Several names go to the lanes in turn; their
            groups must have a device type in common.
        lane_options: its own options; with several names a dict from the names to those of each.
    """

    lanes: int = 3
    backend: str | tuple[str, ...] = "host"  # type: ignore[assignment]
    lane_options: Any = None

    _backend: ClassVar[str] = "round_robin"
    _shown: ClassVar[str] = "RoundRobinOptions"


option_names = RoundRobinOptions.names


def options_of(given: object, where: str) -> RoundRobinOptions:
    """Returns what the user gave as options; what is left out, the environment says.

    Args:
        given: the options, or some of their fields as a dict, or ``None``.
        where: what stands in front of a message.

    Raises:
        TypeError: they are something else.
        ValueError: a variable of the environment is out of its range.
    """
    return RoundRobinOptions.of(given, where, partial(_from_environment, where))


def _from_environment(where: str) -> RoundRobinOptions:
    default = RoundRobinOptions()
    lanes = os.environ.get(_LANES, str(default.lanes))
    if not lanes.isdecimal() or int(lanes) < 1:
        raise ValueError(f"{where} {_LANES} must be a number of at least 1, but is {lanes!r}")
    names = [name.strip() for name in os.environ.get(_BACKEND, "").split(",") if name.strip()]
    return RoundRobinOptions(int(lanes), tuple(names) if len(names) > 1 else (*names, default.backend)[0])


def lanes_of(options: RoundRobinOptions, where: str) -> list[tuple[str, Any]]:
    """Returns backend and options of each lane.

    Raises:
        TypeError: a field is of another type.
        ValueError: a field is out of its range, or a backend is not known.
    """
    count, given = options.lanes, options.lane_options
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{where} lanes must be an int of at least 1, but is {count!r}")
    single = isinstance(options.backend, str)
    named = [options.backend] if isinstance(options.backend, str) else list(options.backend)
    if not named:
        raise ValueError(f"{where} backend names no backend")
    names = [backend_spec(name).name for name in named]
    if "round_robin" in names:
        raise ValueError(f"{where} lanes of a round-robin group cannot be round-robin groups themselves")
    if not single and given is not None:
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{where} lane_options for several backends must be a dict from their names to the options "
                f"of each, but are of type {type(given).__name__}"
            )
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"{where} lane_options are for {unknown}, but the backends are {names}")
    chosen = [names[lane % len(names)] for lane in range(count)]
    return [(name, given if single or given is None else given.get(name)) for name in chosen]


_MESSAGES = frozenset({"send", "recv", "recv_anysource"})
_BREAKING = (PeerLostError, GroupAbortedError)
"""Errors that tell of a lane that it is broken, where the lane itself does not."""


def capabilities() -> Capabilities | None:
    """Returns what groups with the default options can do; those with other lanes can do what these can."""
    parts = [capabilities_of(name) for name, _ in lanes_of(RoundRobinOptions(), "")]
    stated = [part for part in parts if part is not None]
    return _of_lanes(stated) if len(stated) == len(parts) else None


def create(options: GroupOptions) -> ProcessGroupRoundRobin:
    """Returns a composition of new groups; called by all its ranks, blocks until they are connected.

    Args:
        options: ``pg_options`` may be :class:`RoundRobinOptions` or a dict of their fields; without them the
            environment variables ``COLLECTIVES_ROUND_ROBIN_LANES`` and ``COLLECTIVES_ROUND_ROBIN_BACKEND``
            (several by commas), the same on every rank, stand for the first two fields, and without those it
            is three host groups.

    Raises:
        TypeError: ``pg_options`` are something else.
        ValueError: a field of them is out of its range, or the lanes have no device type in common.
        DistBackendError: a lane could not be made; the message and ``.lane`` name it.
    """
    where = f"[rank {options.rank}] pg_options of the round_robin backend:"
    groups: list[ProcessGroup] = []
    try:
        for lane, (backend, own) in enumerate(lanes_of(options_of(options.pg_options, where), where)):
            made = replace(
                options,
                store=PrefixStore(f"lane{lane}", options.store),
                group_name=f"{options.group_name}/lane{lane}",
                pg_options=own,
                split_from=None,
            )
            groups.append(create_group(backend, made))
        return ProcessGroupRoundRobin(
            groups, store=options.store, group_name=options.group_name, group_desc=options.group_desc
        )
    except BaseException as error:
        for group in groups:
            group.abort()
        if isinstance(error, DistError):
            name_lane(error, len(groups), f"round_robin group {options.group_name!r}, which is being made")
        raise


def decline(pg_options: Any) -> None:
    """Does what the lanes' backends need of a rank that stays out of a composition; may wait for its members.

    Args:
        pg_options: as the options of :func:`create` have them.
    """
    where = "pg_options of the round_robin backend:"
    for backend, own in lanes_of(options_of(pg_options, where), where):
        decline_group(backend, own)


def round_robin_process_groups(groups: Sequence[ProcessGroup]) -> ProcessGroupRoundRobin:
    """Returns the composition of groups that exist, such as some that ``new_group`` made of the same ranks.

    Every rank calls it with its handles of the same groups in the same order. Nothing is sent. The
    composition owns the groups from now on: do not issue collectives on them directly, and let it shut them
    down.

    Args:
        groups: the lanes; tensors may be on the devices that all of them take.

    Raises:
        TypeError: an entry is no :class:`~collectives.ProcessGroup`.
        ValueError: there is none, one comes twice, they differ in rank or size, or have no device type
            in common.

    Example:
        With 2 ranks::

            from collectives.backends.round_robin import round_robin_process_groups

            lanes = round_robin_process_groups([collectives.new_group() for _ in range(3)])
            works = [collectives.all_reduce(torch.ones(4), group=lanes, async_op=True) for _ in range(6)]
            for work in works:
                work.wait()
            lanes.shutdown()
    """
    return ProcessGroupRoundRobin(groups)


class ProcessGroupRoundRobin(ForwardingGroup):
    """Several groups ("lanes") as one.

    The n-th collective goes to lane n modulo the number of lanes, on every rank, because members issue the
    same collectives in the same order. Collectives on different lanes run at the same time, and a later one
    may be done first. Point-to-point operations stay on the first lane, where messages keep their order. A
    barrier covers all lanes, from that whose turn it is: it is done when all collectives issued before it
    are. Wrong arguments take no turn, nor do point-to-point operations.

    **Waiting.** ``Work.wait()`` waits for its own collective, not for those that were issued before it on
    other lanes. For CUDA tensors it makes the current stream wait, as the lane's own Work does. Results that
    depend on each other need a wait in between, also where one group would have kept their order.

    **Numerics.** Where all lanes are of one kind, the result of a collective does not depend on its lane.

    **Errors** of a lane name it, also as ``.lane``. What breaks a lane breaks the others too, for all ranks:
    errors of every lane have the class and the attributes that those of the broken one have. Wrong arguments
    break nothing, nor do mismatches, unless an asynchronous barrier meets something else after more
    collectives were issued behind it.

    **Lanes** may be of several kinds where they have a device type in common; the composition offers what all
    of them can do. Sub-groups are compositions of their own, of groups of fewer ranks.

    Args:
        groups: the lanes, in the same order on every rank; their time limit becomes that of the first.
        store: the group's own key/value store; ``None`` takes a part of the first lane's.
        group_name: name, unique in the job; empty for one made of the lanes' names.
        group_desc: free text.

    Raises:
        TypeError: an entry is no :class:`~collectives.ProcessGroup`.
        ValueError: there is none, one comes twice, they differ in rank or size, or have no device type
            in common.
    """

    def __init__(
        self, groups: Sequence[ProcessGroup], *, store: Any = None, group_name: str = "", group_desc: str = ""
    ) -> None:
        _check(groups)
        first = groups[0]
        if store is None and first.get_group_store() is not None:
            store = PrefixStore("round_robin", first.get_group_store())
        name = group_name or "+".join(group.group_name for group in groups)
        super().__init__(groups, store, name, group_desc)
        self._global_ranks = first.global_ranks
        self._lanes = tuple(groups)
        self._turn = 0
        self._epoch = 0
        parts = [lane.capabilities for lane in self._lanes]
        self._capabilities = _of_lanes(parts)
        # A lane that takes more than the composition would do so on the fast path.
        self._fast_path = all(part == self._capabilities for part in parts)
        # Where no lane detects mismatches, a barrier need not wait for that before it takes all lanes.
        self._detects_mismatch = any(lane.detects_mismatch for lane in self._lanes)
        self._begun: weakref.ref[BarrierWork] | None = None
        self._cause: DistError | None = None
        self._lock = threading.Condition()  # notified when no thread breaks lanes any more
        self._breaking = 0
        for group in groups:
            group.set_timeout(first.timeout)

    @property
    def capabilities(self) -> Capabilities:
        """What all lanes can do; for messages, what the first can."""
        return self._capabilities

    @property
    def lanes(self) -> tuple[ProcessGroup, ...]:
        """The groups, in turn."""
        return self._lanes

    def name(self) -> str:
        """Returns ``"round_robin"``."""
        return "round_robin"

    def describe(self) -> str:
        """Returns the group in words, for messages."""
        kinds = "/".join(dict.fromkeys(lane.name() for lane in self._lanes))
        plural = "" if len(self._lanes) == 1 else "s"
        return f"{super().describe()} over {len(self._lanes)} {kinds} lane{plural}"

    # ---- turns ---------------------------------------------------------------------------------------------

    def _forward(self, tensor: torch.Tensor, issue: Callable[[ProcessGroup], Work]) -> Work:  # noqa: ARG002
        """Issues a collective on the lane whose turn it is."""
        self._check_whole()
        self._cover()
        turn = self._turn
        self._turn = turn + 1
        try:
            return self._on(turn % len(self._lanes), issue)
        except DistError:
            raise
        except (TypeError, ValueError):
            self._turn = turn  # wrong arguments, which only the lane could see
            raise

    def _on(self, lane: int, issue: Callable[[ProcessGroup], Work]) -> Work:
        """Issues an operation on a lane."""
        self._check_whole()
        failed = partial(self._failed, lane, self._epoch)
        try:
            return LaneWork(issue(self._lanes[lane]), failed)
        except DistError as error:
            failed(error)
            raise

    def fast_collective(
        self,
        opcode: int,
        output: Any = None,
        input: Any = None,
        reduce_op: int = 0,
        root: Any = 0,
        list_form: bool = False,
        async_op: bool = False,
    ) -> Work | None:
        """Issues a collective where the lane whose turn it is takes the fast path."""
        if not self._fast_path or opcode == BARRIER.opcode or self._cause is not None:
            return None
        self._cover()
        turn = self._turn
        lane = turn % len(self._lanes)
        # Before the call: it may block, and another thread issue the next collective meanwhile.
        self._turn = turn + 1
        try:
            work = self._lanes[lane].fast_collective(
                opcode, output, input, reduce_op, root, list_form, async_op
            )
        except DistError as error:
            self._failed(lane, self._epoch, error)
            raise
        if work is None:
            self._turn = turn
            return None
        return LaneWork(work, partial(self._failed, lane, self._epoch)) if async_op else work

    def fast_message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, async_op: bool = False
    ) -> Work | None:
        """Sends or receives a tensor where the first lane takes the fast path."""
        if not self._fast_path or self._cause is not None:
            return None
        work = None
        try:
            work = self._lanes[0].fast_message(sends, tensor, peer, tag, async_op)
            failed = partial(self._failed, 0, self._epoch)
            return LaneWork(work, failed) if work is not None and async_op else work
        except DistError as error:
            self._failed(0, self._epoch, error)
            raise
        except BaseException:  # of a signal handler
            if work is not None:
                work._rest()
            raise

    def _check_whole(self) -> None:
        cause = self._cause
        if cause is not None:
            refuse_broken(f"[rank {self._rank}] {self.describe()}:", cause, ended=False)

    def _failed(self, lane: int, epoch: int, error: DistError) -> None:
        """Handles an error of a lane, unless it is of the time before the lanes were connected anew."""
        name_lane(error, lane, self.describe())
        with self._lock:
            if epoch != self._epoch:
                return
            self._breaking += 1
        try:
            cause = self._lanes[lane]._first_cause() or (error if isinstance(error, _BREAKING) else None)
            if cause is not None:
                self._break(error, cause)
        finally:
            with self._lock:
                self._breaking -= 1
                self._lock.notify_all()

    def _break(self, error: DistError, cause: DistError) -> None:
        """Refuses later operations, and breaks the other lanes for what broke one, so that all name that.

        Args:
            error: what this rank has raised.
            cause: what all ranks are told.
        """
        if self._cause is None:
            self._cause = error
        self._each(lambda lane: lane._break_for(cause))

    @contextmanager
    def _together(self) -> Iterator[None]:
        with self._lanes[0]._together():
            yield

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return self._on(0, lambda lane: lane._send(tensor, dst, tag))

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        return self._on(0, lambda lane: lane._recv(tensor, src, tag))

    def issue(self, call: Call) -> Work:
        """Issues a collective on the lane whose turn it is; a barrier on all lanes."""
        return self._barrier(call) if call.operation is BARRIER else super().issue(call)

    def _barrier(self, call: Call) -> Work:
        """Covers all lanes."""
        self._check_whole()
        self._cover()
        first = self._turn % len(self._lanes)
        self._turn += 1
        end = time.monotonic() + (call.timeout or self._timeout).total_seconds()
        others = [(first + n) % len(self._lanes) for n in range(1, len(self._lanes))]

        def barrier(lane: int, asynchronous: bool) -> Work:
            own = replace(call, timeout=left_until(end), async_op=asynchronous)
            return self._on(lane, lambda group: group.issue(own))

        if not self._detects_mismatch:
            return CoalescedWork([barrier(lane, True) for lane in (first, *others)])
        work = barrier(first, call.async_op)
        if call.async_op:
            whole = BarrierWork(work, lambda: [barrier(n, True) for n in others], self._out_of_step)
            self._begun = weakref.ref(whole)  # it holds the group
            return whole
        work.wait()
        try:
            for lane in others:
                barrier(lane, False).wait()
        except CollectiveMismatchError as error:
            self._out_of_step(error)
            raise
        return CompletedWork()

    def _out_of_step(self, error: CollectiveMismatchError) -> None:
        """Breaks the lanes after a barrier that only some of them have carried out."""
        self._break(error, error)

    def _cover(self) -> None:
        """Lets a barrier that has begun on its first lane reach the others before the next collective."""
        begun, self._begun = self._begun, None
        work = None if begun is None else begun()
        if work is not None:
            work.cover()

    def _break_for(self, cause: DistError) -> None:
        if self._cause is None:
            self._cause = GroupAbortedError(f"{self.where()} {cause}", **cause.details(), cause=cause.cause)
        super()._break_for(cause)

    def _renew(self, others_are_late: Callable[[], object] = lambda: None) -> None:
        self._begin_epoch(self._timeout)
        super()._renew(others_are_late)
        self._turn, self._begun, self._cause = 0, None, None

    def _take_members(
        self, members: Members, store: Any, limit: timedelta, look: Callable[[], DistError | None]
    ) -> None:
        end = time.monotonic() + limit.total_seconds()
        self._begin_epoch(limit)
        super()._take_members(members, store, left_until(end), look)
        self._turn, self._begun, self._cause = 0, None, None

    def _store_for(self, number: int, store: Any) -> Any:
        return PrefixStore(f"lane{number}", store)

    def _kind(self) -> str:
        return f"round_robin over {[lane._kind() for lane in self._lanes]}"

    def _begin_epoch(self, limit: timedelta) -> None:
        """Lets errors of lanes count no more: they are connected anew.

        Args:
            limit: how long other threads, which must not break what is connected anew, may go on doing so.

        Raises:
            CollectiveTimeoutError: they do for longer.
        """
        with self._lock:
            self._epoch += 1
            if not self._lock.wait_for(lambda: not self._breaking, limit.total_seconds()):
                raise CollectiveTimeoutError(
                    f"[rank {self._rank}] {self.describe()}: another thread of this rank breaks the lanes "
                    f"after an error, and was not done within {limit.total_seconds():g} s",
                    self._rank,
                )

    def abort(self) -> None:
        """Breaks all lanes at once."""
        ended = self._end("was aborted by this rank")
        self._cause = self._cause or ended
        super().abort()

    def shutdown(self) -> None:
        """Finishes the operations already issued, then frees all lanes."""
        self._cover()
        try:
            self._each(lambda lane: lane.shutdown())
        finally:
            self._end("was shut down")

    def _end(self, how: str) -> GroupAbortedError:
        """Returns why the group ended here; takes the place of a lost rank, which is its cause then."""
        lost = self._cause if isinstance(self._cause, PeerLostError) else None
        first = "" if lost is None else f"; first cause: {lost}"
        details = {"rank": self._rank} if lost is None else lost.details()
        ended = GroupAbortedError(
            f"[rank {self._rank}] {self.describe()} {how}{first}", **details, cause=lost
        )
        if lost is not None:
            ended.__cause__ = lost
            self._cause = ended
        return ended


def _check(groups: Sequence[ProcessGroup]) -> None:
    """Checks that groups can be lanes of one composition."""
    if not groups:
        raise ValueError("a round-robin group needs at least one group, but the list is empty")
    for i, group in enumerate(groups):
        if not isinstance(group, ProcessGroup):
            raise TypeError(
                f"entry {i} of the groups must be a ProcessGroup, but is of type {type(group).__name__}"
            )
    first = groups[0]
    for i, group in enumerate(groups):
        earlier = next(j for j, other in enumerate(groups) if other is group)
        if earlier != i:
            raise ValueError(
                f"[rank {first.rank()}] groups {earlier} and {i} are the same group {group.group_name!r}"
            )
    if not _devices([group.capabilities for group in groups]):
        devices = {group.group_name: sorted(group.capabilities.devices) for group in groups}
        raise ValueError(
            f"[rank {first.rank()}] the groups must have a device type in common, but take {devices}"
        )


def _devices(parts: Sequence[Capabilities]) -> frozenset[str]:
    return frozenset.intersection(*(part.devices for part in parts))


def _of_lanes(parts: Sequence[Capabilities]) -> Capabilities:
    """Returns what a composition of groups with these capabilities can do."""
    devices = sorted(_devices(parts))
    if len(devices) > 1:
        return by_device({device: _of_lanes([part.on(device) for part in parts]) for device in devices})
    everywhere, first = in_common(parts), parts[0]
    operations = (everywhere.operations - _MESSAGES) | (first.operations & _MESSAGES)
    return replace(everywhere, operations=operations, tags=first.tags)


# ---- Works -----------------------------------------------------------------------------------------------


_PARTS = re.compile(r"(\[rank \d+\] )?(.*)", re.DOTALL)
"""The rank in front of a message, where it is there, and the rest."""

Failed = Callable[[DistError], None]
"""Handles an error of a lane: names the lane in it, and breaks the composition where it must."""


def name_lane(error: DistError, lane: int, composition: str) -> None:
    """Adds the lane to the message of an error, once, behind the rank; keeps its number as ``error.lane``.

    Args:
        error: what a lane raised.
        lane: number of the lane, from 0.
        composition: the whole group in words.
    """
    if not hasattr(error, "lane"):
        error.lane = lane  # type: ignore[attr-defined]
        rank, text = _PARTS.findall(str(error))[0]
        error.args = (f"{rank}lane {lane} of {composition}: {text}", *error.args[1:])


class LaneWork(WrappedWork):
    """The Work of a lane, whose error the composition handles.

    Args:
        inner: the lane's Work.
        failed: called with its error, wherever that is seen first; may be called again with it.
    """

    __slots__ = ("_failed", "_future")

    def __init__(self, inner: Work, failed: Failed) -> None:
        super().__init__(inner)
        self._failed = failed
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for this operation; those of other lanes may still go on."""
        try:
            return self.inner.wait(timeout)
        except DistError as error:
            # A limit given to wait() may have passed, while the operation goes on or has just got done.
            if self.inner.exception() is not None:
                self._failed(error)
            raise

    def exception(self) -> BaseException | None:
        """Returns the error of the operation."""
        error = self.inner.exception()
        if isinstance(error, DistError):
            self._failed(error)
        return error

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the outputs."""
        if self._future is None:
            future = self.inner.get_future()
            # On CUDA it is done from the start, and a callback would put a stream of torch's between.
            done_well = future.done() and self.inner.exception() is None
            return take_future(self, future if done_well else chain(future, self._outcome))
        return self._future

    def _outcome(self, done: Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        try:
            return done.value()
        except DistError as error:
            self._failed(error)
            raise


class BarrierWork(Work):
    """A barrier that begins on one lane, and covers the others when all ranks have called it there.

    A rank that calls something else does so on that first lane, where both get an error. The others are still
    in step then. But a collective that is issued meanwhile comes behind the barrier on its own lane, which
    the barrier must have reached before that: :meth:`cover`.

    Args:
        first: the barrier of the first lane.
        issue_others: issues those of the other lanes, without blocking.
        broken: called with a mismatch that leaves the lanes out of step.
    """

    def __init__(
        self,
        first: Work,
        issue_others: Callable[[], Sequence[Work]],
        broken: Callable[[CollectiveMismatchError], None],
    ) -> None:
        self._first = first
        self._issue_others = issue_others
        self._broken = broken
        self._others: CoalescedWork | None = None
        self._error: BaseException | None = None
        # A future that is done calls back inside of cover(), and an abort out of it.
        self._lock = threading.RLock()
        self._future: Future[Any] | None = None
        first.get_future().add_done_callback(self._first_done)

    def cover(self) -> None:
        """Goes on to the other lanes now, unless it has, or the first has failed."""
        with self._lock:
            if self._others is not None or self._error is not None:
                return
            if self._first.is_completed() and self._first.exception() is not None:
                return
            try:
                self._others = CoalescedWork(self._issue_others())
            except DistError as error:
                self._error = error

    def _first_done(self, done: Future[Any]) -> None:
        """Covers the other lanes, also where nobody waits."""
        try:
            done.value()
        except Exception as error:  # noqa: BLE001 - every wait() raises it
            self._note(error)
        else:
            self.cover()

    def _note(self, error: BaseException) -> None:
        with self._lock:
            out_of_step = self._others is not None
        if out_of_step and isinstance(error, CollectiveMismatchError):
            self._broken(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the barriers of all lanes."""
        limit = seconds_to_wait(timeout)
        deadline = time.monotonic() + limit
        try:
            self._first.wait(timeout)
            self.cover()
            if self._others is None:
                raise self._error  # type: ignore[misc]  # cover() has set one of the two
            left = max(1e-3, deadline - time.monotonic())  # not zero, which would be no limit
            return self._others.wait(timedelta(seconds=left) if limit > 0.0 else None)
        except CollectiveMismatchError as error:
            self._note(error)
            raise

    def is_completed(self) -> bool:
        """Returns whether the barriers of all lanes are done, or one has failed."""
        if not self._first.is_completed():
            return False
        self.cover()
        return self._others is None or self._others.is_completed()

    def exception(self) -> BaseException | None:
        """Returns the error of a lane."""
        others = self._others
        return self._first.exception() or self._error or (None if others is None else others.exception())

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of an empty list."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                self._first.get_future().add_done_callback(self._wait_for_others)
            return self._future

    def _wait_for_others(self, done: Future[Any]) -> None:
        self.cover()
        if self._others is None:
            self._complete(done)
        else:
            self._others.get_future().add_done_callback(self._complete)

    def _complete(self, _: Future[Any]) -> None:
        if self._future is not None:
            settle(self._future, self.exception(), [])
