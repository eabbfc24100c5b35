"""Several groups as one: successive collectives go to successive groups.

One group runs its collectives one after another, on one thread or stream and over one set of connections.
Several groups of the same ranks, used in turn, run several at the same time (PyTorch Distributed, VLDB 2020,
sections 3.3 and 5.4).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.futures import Future

from collectives import ProcessGroup, Work
from collectives.capabilities import Capabilities
from collectives.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    PeerLostError,
)
from collectives.registry import GroupOptions, backend_spec, create_group
from collectives.types import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from collectives.work import CoalescedWork

__all__ = ["ProcessGroupRoundRobin", "RoundRobinOptions", "create", "round_robin_process_groups"]

_MESSAGES = frozenset({"send", "recv", "recv_anysource"})


@dataclass(frozen=True, slots=True)
class RoundRobinOptions:
    """Options of the round_robin backend, given as ``pg_options``.

    Attributes:
        lanes: number of groups, at least 1.
        backend: backend of every one; any but ``"round_robin"``.
        lane_options: its own options.
    """

    lanes: int = 3
    backend: str = "host"
    lane_options: Any = None


def create(options: GroupOptions) -> ProcessGroupRoundRobin:
    """Makes the groups and their composition; called by all its ranks, blocks until they are connected.

    Args:
        options: ``pg_options`` may be :class:`RoundRobinOptions`; without them the environment variables
            ``COLLECTIVES_ROUND_ROBIN_LANES`` and ``COLLECTIVES_ROUND_ROBIN_BACKEND``, the same on every rank,
            stand for its first two fields, and without those it is three host groups.

    Raises:
        TypeError: ``pg_options`` are something else.
        ValueError: a field of them is out of its range.
    """
    where = f"[rank {options.rank}] pg_options of the round_robin backend:"
    given = _from_environment() if options.pg_options is None else options.pg_options
    if not isinstance(given, RoundRobinOptions):
        raise TypeError(f"{where} they must be RoundRobinOptions, but are of type {type(given).__name__}")
    if isinstance(given.lanes, bool) or not isinstance(given.lanes, int) or given.lanes < 1:
        raise ValueError(f"{where} lanes must be an int of at least 1, but is {given.lanes!r}")
    if backend_spec(given.backend).name == "round_robin":
        raise ValueError(f"{where} lanes of a round-robin group cannot be round-robin groups themselves")
    groups: list[ProcessGroup] = []
    try:
        for lane in range(given.lanes):
            made = GroupOptions(
                store=torch_distributed.PrefixStore(f"lane{lane}", options.store),  # type: ignore[attr-defined]
                rank=options.rank,
                size=options.size,
                timeout=options.timeout,
                group_name=f"{options.group_name}/lane{lane}",
                group_desc=options.group_desc,
                global_ranks=options.global_ranks,
                device_id=options.device_id,
                pg_options=given.lane_options,
            )
            groups.append(create_group(given.backend, made))
    except BaseException:
        for group in groups:
            group.abort()
        raise
    return ProcessGroupRoundRobin(
        groups, store=options.store, group_name=options.group_name, group_desc=options.group_desc
    )


def _from_environment() -> RoundRobinOptions:
    """Returns the options that the environment asks for."""
    default = RoundRobinOptions()
    lanes = os.environ.get("COLLECTIVES_ROUND_ROBIN_LANES", str(default.lanes))
    if not lanes.isdecimal() or int(lanes) < 1:
        raise ValueError(f"COLLECTIVES_ROUND_ROBIN_LANES must be a number of at least 1, but is {lanes!r}")
    return RoundRobinOptions(int(lanes), os.environ.get("COLLECTIVES_ROUND_ROBIN_BACKEND") or default.backend)


def round_robin_process_groups(groups: Sequence[ProcessGroup]) -> ProcessGroupRoundRobin:
    """Returns the composition of groups that exist, such as some that ``new_group`` made of the same ranks.

    Every rank calls it with its handles of the same groups in the same order. Nothing is sent. The
    composition owns the groups from now on: do not issue collectives on them directly, and let it shut them
    down.

    Raises:
        TypeError: an entry is no :class:`~collectives.ProcessGroup`.
        ValueError: there is none, one comes twice, or they differ in rank, size or devices.
    """
    return ProcessGroupRoundRobin(groups)


class ProcessGroupRoundRobin(ProcessGroup):
    """Several groups ("lanes") as one.

    The n-th collective goes to lane n modulo the number of lanes, on every rank, because members issue the
    same collectives in the same order. Collectives on different lanes run at the same time, and a later one
    may be done first. Point-to-point operations stay on the first lane, where messages keep their order. A
    barrier covers all lanes: it is done when all collectives issued before it are.

    **Numerics.** Where all lanes are of one kind, the result of a collective does not depend on its lane.

    **Errors.** An error that breaks one lane breaks the others too: the next call raises
    :class:`~collectives.errors.GroupAbortedError`, or where a rank is lost
    :class:`~collectives.errors.PeerLostError` again. Wrong arguments break nothing, nor do mismatches, except
    that of a barrier with something else.

    Args:
        groups: the lanes, in the same order on every rank; their time limit becomes that of the first.
        store: the group's own key/value store; ``None`` takes a part of the first lane's.
        group_name: name, unique in the job; empty for one made of the lanes' names.
        group_desc: free text.

    Raises:
        TypeError: an entry is no :class:`~collectives.ProcessGroup`.
        ValueError: there is none, one comes twice, or they differ in rank, size or devices.
    """

    def __init__(
        self, groups: Sequence[ProcessGroup], *, store: Any = None, group_name: str = "", group_desc: str = ""
    ) -> None:
        _check(groups)
        first = groups[0]
        if store is None and first.get_group_store() is not None:
            prefix: Any = torch_distributed.PrefixStore  # type: ignore[attr-defined]
            store = prefix("round_robin", first.get_group_store())
        super().__init__(
            first.rank(),
            first.size(),
            timeout=first.timeout,
            store=store,
            group_name=group_name or "+".join(group.group_name for group in groups),
            group_desc=group_desc,
        )
        self._lanes = tuple(groups)
        self._turns = itertools.cycle(self._lanes)
        self._capabilities = _in_common(self._lanes)
        self._cause: BaseException | None = None
        for group in groups:
            group.set_timeout(first.timeout)

    @property
    def capabilities(self) -> Capabilities:
        """What all lanes can do; for messages, what the first can."""
        return self._capabilities

    @property
    def detects_mismatch(self) -> bool:
        """Whether all lanes do."""
        return all(lane.detects_mismatch for lane in self._lanes)

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

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of all future operations that name none."""
        super().set_timeout(timeout)
        for lane in self._lanes:
            lane.set_timeout(timeout)

    def _run(self, lane: ProcessGroup, issue: Callable[[ProcessGroup], Work]) -> Work:
        cause = self._cause
        if cause is not None:
            text = f"[rank {self._rank}] {self.describe()} is broken; first cause: {cause}"
            if isinstance(cause, PeerLostError):
                raise PeerLostError(text, cause.rank) from cause
            raise GroupAbortedError(text) from cause
        try:
            return _LaneWork(self, issue(lane))
        except (CollectiveTimeoutError, PeerLostError, GroupAbortedError) as error:
            self._break(error)
            raise

    def _break(self, cause: BaseException) -> None:
        """Refuses later operations and aborts all lanes after one broke, or after an abort.

        But a rank that is lost to one lane is lost to all: each finds that out and names it, unless the abort
        of a rank that already knows comes first.
        """
        if self._cause is None:
            self._cause = cause
        if not isinstance(cause, PeerLostError):
            for lane in self._lanes:
                lane.abort()

    def _broadcast(self, tensor: torch.Tensor, opts: BroadcastOptions) -> Work:
        return self._run(next(self._turns), lambda lane: lane._broadcast(tensor, opts))

    def _allreduce(self, tensor: torch.Tensor, opts: AllreduceOptions) -> Work:
        return self._run(next(self._turns), lambda lane: lane._allreduce(tensor, opts))

    def _reduce(self, tensor: torch.Tensor, opts: ReduceOptions) -> Work:
        return self._run(next(self._turns), lambda lane: lane._reduce(tensor, opts))

    def _allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, opts: AllgatherOptions) -> Work:
        return self._run(next(self._turns), lambda lane: lane._allgather(outputs, tensor, opts))

    def _allgather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: AllgatherOptions) -> Work:
        return self._run(next(self._turns), lambda lane: lane._allgather_single(output, tensor, opts))

    def _gather(self, outputs: list[torch.Tensor] | None, tensor: torch.Tensor, opts: GatherOptions) -> Work:
        return self._run(next(self._turns), lambda lane: lane._gather(outputs, tensor, opts))

    def _scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, opts: ScatterOptions) -> Work:
        return self._run(next(self._turns), lambda lane: lane._scatter(output, inputs, opts))

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: list[torch.Tensor], opts: ReduceScatterOptions
    ) -> Work:
        return self._run(next(self._turns), lambda lane: lane._reduce_scatter(output, inputs, opts))

    def _reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: ReduceScatterOptions
    ) -> Work:
        return self._run(next(self._turns), lambda lane: lane._reduce_scatter_single(output, tensor, opts))

    def _alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: AllToAllOptions
    ) -> Work:
        return self._run(next(self._turns), lambda lane: lane._alltoall(outputs, inputs, opts))

    def _alltoall_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: AllToAllOptions,
    ) -> Work:
        return self._run(
            next(self._turns),
            lambda lane: lane._alltoall_single(output, tensor, output_splits, input_splits, opts),
        )

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return self._run(self._lanes[0], lambda lane: lane._send(tensor, dst, tag))

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        return self._run(self._lanes[0], lambda lane: lane._recv(tensor, src, tag))

    def _barrier(self, opts: BarrierOptions) -> Work:
        # All at once, also for one that blocks: a rank that issues something else has it on one lane only,
        # and must be found there while this rank waits on the others.
        started = BarrierOptions(opts.timeout, True, opts.device_ids, opts.device)
        try:
            works = [self._run(lane, lambda lane: lane._barrier(started)) for lane in self._lanes]
        except CollectiveMismatchError as error:
            self._break(error)
            raise
        for work in works:
            if not work.is_success():
                work.get_future().add_done_callback(self._note_barrier)
        return CoalescedWork(works)

    def _note_barrier(self, done: Future[Any]) -> None:
        """Breaks the lanes after a mismatch in a barrier: the lanes are no longer in step."""
        try:
            done.value()
        except CollectiveMismatchError as error:
            self._break(error)
        except Exception:  # noqa: BLE001, S110 - raised by wait()
            pass

    def abort(self) -> None:
        """Breaks all lanes at once."""
        self._break(self._end("was aborted by this rank"))

    def shutdown(self) -> None:
        """Finishes the operations already issued, then frees all lanes."""
        for lane in self._lanes:
            lane.shutdown()
        self._end("was shut down")

    def _end(self, how: str) -> GroupAbortedError:
        """Returns why the group ended here; takes the place of a lost rank, which is its cause then."""
        lost = self._cause if isinstance(self._cause, PeerLostError) else None
        first = "" if lost is None else f"; first cause: {lost}"
        ended = GroupAbortedError(f"[rank {self._rank}] {self.describe()} {how}{first}")
        if lost is not None:
            ended.__cause__ = lost
            self._cause = ended
        return ended


class _LaneWork(Work):
    """The Work of a lane; an error that breaks the lane breaks the composition."""

    __slots__ = ("_group", "_inner")

    def __init__(self, group: ProcessGroupRoundRobin, inner: Work) -> None:
        self._group = group
        self._inner = inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the operation."""
        try:
            return self._inner.wait(timeout)
        except (CollectiveTimeoutError, PeerLostError, GroupAbortedError) as error:
            # A limit given to wait() may have passed, and the operation goes on.
            if self._inner.is_completed():
                self._group._break(error)
            raise

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed."""
        return self._inner.is_completed()

    def exception(self) -> BaseException | None:
        """Returns the error of the operation."""
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        """Returns the outputs."""
        return self._inner.result()

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        return self._inner.source_rank()

    def block_current_stream(self) -> None:
        """Makes the current CUDA stream wait for the operation."""
        self._inner.block_current_stream()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the outputs."""
        return self._inner.get_future()


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
        for what, mine, expected in (
            ("rank", group.rank(), first.rank()),
            ("size", group.size(), first.size()),
            ("devices", sorted(group.capabilities.devices), sorted(first.capabilities.devices)),
        ):
            if mine != expected:
                raise ValueError(
                    f"[rank {first.rank()}] the groups must be of the same ranks and devices, but {what} is "
                    f"{expected} in group 0 ({first.group_name!r}) and {mine} in group {i} "
                    f"({group.group_name!r})"
                )


def _in_common(lanes: Sequence[ProcessGroup]) -> Capabilities:
    """Returns what all lanes can do; messages and tags are the first lane's."""
    first = lanes[0].capabilities
    everywhere = reduce(lambda a, b: a & b, (lane.capabilities.operations for lane in lanes))
    tables = [lane.capabilities.reductions for lane in lanes]
    limited = [lane.capabilities.moves for lane in lanes if lane.capabilities.moves is not None]
    return Capabilities(
        devices=first.devices,
        reductions={
            dtype: reduce(lambda a, b: a & b, (table[dtype] for table in tables))
            for dtype in first.reductions
            if all(dtype in table for table in tables)
        },
        operations=(everywhere - _MESSAGES) | (first.operations & _MESSAGES),
        moves=reduce(lambda a, b: a & b, limited) if limited else None,
        uneven=all(lane.capabilities.uneven for lane in lanes),
        tags=first.tags,
    )
