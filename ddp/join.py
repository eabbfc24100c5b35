"""Join: training on uneven inputs, where ranks that ran out of inputs shadow those that have some.

A rank has *joined* when it has left the training loop; before that it is active. Joined ranks shadow the
active ones: their hooks communicate what those do.

Before a joinable communicates, an all-reduce tells the joined ranks so. There are two protocols. Where all
joinables are of this package, each rank adds its *code* to its own place of a sum: zero where it has joined,
a number for what it communicates where it is active, and a negative one where it failed; so everyone knows
who does what. Else it is that of ``torch.distributed.algorithms.join``, a sum of ones, so that joinables of
torch take part in a :class:`Join` of ours, and ours in one of torch.

By the contract of torch, the first joinable notifies once in each iteration, and joined ranks then run the
main hooks of all joinables in order. Joinables of this package notify before all that they communicate, and
joined ranks run the hook of that one alone: so they may communicate in any order and as often as they like.
That is done where all joinables do so.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import torch

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, Work
from collectives.core.work import CompletedWork
from collectives.ddp.default_group import resolve_group
from collectives.ddp.errors import JoinError, UnevenInputsError
from collectives.dynamo import Uncompiled

__all__ = ["Join", "JoinHook", "Joinable"]

_SUM = AllreduceOptions(reduceOp=ReduceOp.SUM)
_SUM_NOW = AllreduceOptions(asyncOp=False, reduceOp=ReduceOp.SUM)

JOINED = 0
_FAILED = -1

_SKEW = 1000
"""A rank that has shadowed so many iterations warns."""

_open: set[ProcessGroup] = set()
"""Groups over which a context is open in this process."""


# ---- codes -------------------------------------------------------------------------------------------------


def _row_of(group: ProcessGroup, device: torch.device, code: int) -> torch.Tensor:
    """Returns what this rank adds to the sum of all ranks' codes."""
    codes = [0] * group.size()
    codes[group.rank()] = code
    return torch.tensor(codes, dtype=torch.int32, device=device)


def codes_of_all(group: ProcessGroup, device: torch.device, code: int) -> list[int]:
    """Returns the ranks' codes; called by all of them, blocks."""
    row = _row_of(group, device, code)
    group.allreduce([row], _SUM_NOW).wait()
    codes: list[int] = group.to_host(row).tolist()
    return codes


class _JoinProtocol:
    """The announcements of one context.

    An active rank's code stands for the place of the joinable that is about to communicate, and for whether
    that is a backward pass: of a model that announces these, all else is its forward.

    Args:
        group: the ranks.
        device: device of tensors that the group takes.
        kinds: what the joinables are, for messages.
        throws: whether it is an error that a rank has joined while another is active.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, kinds: Sequence[str], *, throws: bool
    ) -> None:
        self._group = group
        self._device = device
        self._kinds = list(kinds)
        self._throws = throws
        self._closed = False

    def close(self) -> None:
        """Ends the context: later calls do nothing."""
        self._closed = True

    def announce_active(self, place: int, *, backward: bool = False) -> None:
        """Tells that this rank is active; blocks until all ranks have announced.

        Args:
            place: place of the joinable that is about to communicate.
            backward: whether that is a backward pass.

        Raises:
            UnevenInputsError: a rank has joined and must not.
            JoinError: a rank failed, or is about to communicate something else.
        """
        if not self._closed:
            self._read(codes_of_all(self._group, self._device, 1 + 2 * place + backward))

    def announce_joined(self) -> tuple[int, bool] | None:
        """Tells that this rank has joined; returns what the others do, ``None`` where all have joined.

        That is the place of a joinable, and whether it is a backward pass.

        Raises:
            UnevenInputsError: a rank is active and must not be.
            JoinError: a rank failed, or active ranks are about to communicate different things.
        """
        return self._read(codes_of_all(self._group, self._device, JOINED))

    def announce_failure(self) -> None:
        """Tells that this rank failed; does not wait for the others."""
        self._group.allreduce([_row_of(self._group, self._device, _FAILED)], _SUM)

    def _read(self, codes: Sequence[int]) -> tuple[int, bool] | None:
        failed = [rank for rank, code in enumerate(codes) if code == _FAILED]
        if failed:
            raise JoinError(f"{self._here()} {_in_words(failed)} left it by an exception", failed)
        joined = [rank for rank, code in enumerate(codes) if code == JOINED]
        if len(joined) == len(codes):
            return None
        if joined and self._throws:
            mine = self._group.rank() in joined
            words = "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
            found = "" if mine else words
            who = _in_words(joined).capitalize()
            raise UnevenInputsError(
                f"{self._here()} {found}{who} exhausted all inputs, while others have some, and "
                "throw_on_early_termination is set",
                joined,
            )
        by_code: dict[int, list[int]] = {}
        for rank, code in enumerate(codes):
            if code != JOINED:
                by_code.setdefault(code, []).append(rank)
        if len(by_code) > 1:
            lines = [f"{_in_words(ranks)}: {self._about(*_read(code))}" for code, ranks in by_code.items()]
            raise JoinError(
                f"{self._here()} ranks are about to communicate different things: {'; '.join(lines)}. Run "
                "forward, backward and step alike on all ranks that have inputs",
                [rank for ranks in by_code.values() for rank in ranks],
            )
        return _read(next(iter(by_code)))

    def _here(self) -> str:
        return f"[rank {self._group.rank()}] Join over {self._group.describe()}:"

    def _about(self, place: int, backward: bool) -> str:
        kind = self._kinds[place] if place < len(self._kinds) else f"joinable {place}"
        return f"{kind}, backward" if backward else kind


def _read(code: int) -> tuple[int, bool]:
    """Returns what the code of an active rank stands for."""
    place, backward = divmod(code - 1, 2)
    return place, bool(backward)


def _in_words(ranks: Sequence[int]) -> str:
    """Returns some ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ---- the context -------------------------------------------------------------------------------------------


class JoinHook(Uncompiled):
    """What a joined rank does in place of a joinable; derive from it and override what there is to do."""

    def main_hook(self) -> None:
        """Communicates what the joinable communicates on active ranks in one iteration.

        Called again and again, while a rank is active.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called once on every rank when all have joined.

        Args:
            is_last_joiner: whether this rank is one of those that joined last.
        """


@dataclass(frozen=True)
class _JoinConfig:
    """What a joinable knows of the context that it takes part in; the first three fields are those of torch.

    Attributes:
        enable: whether there is a context.
        throw_on_early_termination: whether all ranks raise when one of them joins.
        is_first_joinable: whether the joinable notifies in the protocol of torch.
        place: its place among the joinables.
        protocol: carries the notifications; ``None`` where it is that of torch.
        each_notifies: whether all joinables notify before all that they communicate.
    """

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False
    place: int = 0
    protocol: _JoinProtocol | None = None
    each_notifies: bool = False


class Joinable(Uncompiled, ABC):
    """What can take part in a :class:`Join`; its constructor must be called by those of derived classes.

    A joinable calls :meth:`Join.notify_join_context` before it communicates in an iteration.
    """

    _notifies_always: ClassVar[bool] = False
    """Whether it notifies before all that it communicates, which is more than the contract asks for."""

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config: Any = _JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns what a joined rank does in place of this object.

        Args:
            kwargs: keyword arguments of the :class:`Join`, the same for all joinables.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Device of the tensors of the protocol."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The ranks."""


class Join(Uncompiled):
    """Context for training loops that are longer on some ranks than on others; all ranks enter it.

    A rank that leaves the loop stays in the context until all ranks have left theirs, and meanwhile
    communicates in place of each joinable, by its hook. Leaving the context blocks for so long.

    Where all joinables are a :class:`~collectives.ddp.DistributedDataParallel` or a
    :class:`~collectives.ddp.optim.ZeroRedundancyOptimizer`, an exception of a rank's own code inside the
    context is told to the others, which raise :class:`~collectives.ddp.JoinError` instead of waiting for that
    rank; and errors name ranks. Joinables of ``torch.distributed.algorithms.join`` may take part, over
    torch's group of a backend of this package.

    A context may be entered again after it was left. Contexts over one group are not nested: give all
    joinables to one. What is not given, such as an optimizer of torch's or the layers of
    :class:`~collectives.ddp.SyncBatchNorm`, is not shadowed.

    Args:
        joinables: objects over one group, the same on all ranks. Their hooks run in this order.
        enable: whether the context does anything; ``False`` where inputs are known to be even.
        throw_on_early_termination: whether all ranks raise when one of them has left the loop.
        **kwargs: arguments of the joinables' ``join_hook``.

    Raises:
        ValueError: there is no joinable, one is given twice, or they have different groups.
        TypeError: an object is no joinable.
        RuntimeError: entered within another context over this group.
        UnevenInputsError: ``throw_on_early_termination`` is set and a rank has left the loop; raised on all.
        JoinError: the ranks cannot go on together.

    Example:
        With 2 ranks::

            from collectives.ddp import DistributedDataParallel, Join

            model = DistributedDataParallel(torch.nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with Join([model]):
                for _ in range(3 + rank):  # any number on each rank
                    optimizer.zero_grad()
                    model(torch.randn(16, 8)).sum().backward()
                    optimizer.step()
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._joinables = list(joinables)
        if not self._joinables:
            raise ValueError("joinables is empty; Join needs at least one, such as the model")
        if len({id(joinable) for joinable in self._joinables}) < len(self._joinables):
            raise ValueError(f"a joinable is given twice: {', '.join(map(_kind, self._joinables))}")
        self._group = _group_of(self._joinables)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._kwargs = kwargs
        self._hooks: list[Any] = []
        self._protocol: _JoinProtocol | None = None
        self._each_notifies = False
        self._before: list[Any] = []

    # ---- the context -------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        if not self._enable:
            return
        if self._group in _open:
            raise RuntimeError(
                f"[rank {self._group.rank()}] a Join over {self._group.describe()} is open already; give all "
                "joinables to one Join"
            )
        _open.add(self._group)
        self._before = [joinable._join_config for joinable in self._joinables]
        try:
            self._configure()
            self._hooks = [joinable.join_hook(**self._kwargs) for joinable in self._joinables]
        except BaseException as error:
            self._report_failure(error)
            self._leave()
            raise

    def _configure(self) -> None:
        """Tells the joinables of the context."""
        ours = all(isinstance(joinable, Joinable) for joinable in self._joinables)
        self._each_notifies = ours and all(joinable._notifies_always for joinable in self._joinables)
        self._protocol = None
        if ours:
            device = self._joinables[0].join_device
            self._protocol = _JoinProtocol(
                self._group, device, [_kind(j) for j in self._joinables], throws=self._throw
            )
        for place, joinable in enumerate(self._joinables):
            joinable._join_config = _JoinConfig(
                enable=True,
                throw_on_early_termination=self._throw,
                is_first_joinable=place == 0,
                place=place,
                protocol=self._protocol,
                each_notifies=self._each_notifies,
            )

    def _leave(self) -> None:
        """Takes the joinables out of the context."""
        if self._protocol is not None:
            self._protocol.close()
        for joinable, config in zip(self._joinables, self._before, strict=True):
            joinable._join_config = config
        self._hooks = []
        _open.discard(self._group)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shadows the ranks that are active, until none is; does nothing where an exception is raised.

        Raises:
            UnevenInputsError: see the class.
            JoinError: another rank failed, or active ranks communicate different things.
        """
        if not self._enable:
            return
        try:
            if error is not None:
                self._report_failure(error)
                return
            self._shadowed = 0
            last = self._shadow_by_counts() if self._protocol is None else self._shadow_by_protocol()
            for hook in self._hooks:
                hook.post_hook(last)
        except BaseException as failure:
            self._report_failure(failure)
            raise
        finally:
            self._leave()

    def _report_failure(self, error: BaseException) -> None:
        """Tells the other ranks of an error that only this one may know of; does not block."""
        # Errors of collectives may be those of another group, of which the others know nothing. Where all
        # ranks raise, all announce it; over a group that is broken, that raises.
        if self._protocol is not None and not isinstance(error, JoinError):
            with contextlib.suppress(Exception):
                self._protocol.announce_failure()

    def _shadow_by_protocol(self) -> bool:
        """Shadows what the active ranks announce; returns whether this rank is one of the last."""
        last = True
        while self._protocol is not None and (active := self._protocol.announce_joined()) is not None:
            last = False
            place, backward = active
            if place == 0 and not backward:
                self._count_iteration()
            if not self._each_notifies:
                self._run_main_hooks()
            elif backward:
                self._hooks[place].backward_hook()
            else:
                self._hooks[place].main_hook()
        return last

    def _shadow_by_counts(self) -> bool:
        """Shadows iterations, by the protocol of torch; returns whether this rank is one of the last."""
        device = self._joinables[0].join_device
        last = True
        while True:
            active = torch.zeros(1, device=device)
            self._group.allreduce([active], _SUM).wait()
            count = int(self._group.to_host(active))
            if not count:
                return last
            if self._throw:
                self._group.allreduce([torch.ones(1, device=device)], _SUM).wait()
                raise UnevenInputsError(
                    f"Rank {self._group.rank()} exhausted all inputs, while {count} of "
                    f"{self._group.size()} ranks have some, and throw_on_early_termination is set",
                    [self._group.rank()],
                )
            last = False
            self._count_iteration()
            self._run_main_hooks()

    def _run_main_hooks(self) -> None:
        for hook in self._hooks:
            hook.main_hook()

    def _count_iteration(self) -> None:
        self._shadowed += 1
        if self._shadowed == _SKEW:
            warnings.warn(
                f"[rank {self._group.rank()}] this rank ran out of inputs {_SKEW} iterations ago and does "
                "nothing but follow the others; give it more inputs",
                stacklevel=4,
            )

    # ---- what joinables call -----------------------------------------------------------------------------

    @staticmethod
    def notify_join_context(joinable: Any) -> Work | None:
        """Tells the joined ranks that this one is active; called by a joinable before it communicates.

        Blocks until all ranks have notified where all joinables are of this package or where
        ``throw_on_early_termination`` is set. Does nothing outside of a context.

        Args:
            joinable: the caller.

        Returns:
            The Work of the notification where ``joinable`` is the first one, else ``None``.

        Raises:
            TypeError: ``joinable`` was made without the constructor of :class:`Joinable`.
            UnevenInputsError: a rank has joined, and ``throw_on_early_termination`` is set.
            JoinError: a rank failed, or active ranks communicate different things.
        """
        config = getattr(joinable, "_join_config", None)
        if config is None:
            raise TypeError(
                f"{_kind(joinable)} is no joinable; derive it from Joinable, and call that one's constructor"
            )
        if not config.enable:
            return None
        protocol = getattr(config, "protocol", None)  # torch's record has none
        if protocol is not None:
            if config.is_first_joinable or config.each_notifies:
                protocol.announce_active(config.place)
            return CompletedWork() if config.is_first_joinable else None
        if not config.is_first_joinable:
            return None
        return _count(joinable, throws=config.throw_on_early_termination)


def _count(joinable: Any, *, throws: bool) -> Work:
    """Notifies as joinables of torch do."""
    group, device = resolve_group(joinable.join_process_group), joinable.join_device
    work = group.allreduce([torch.ones(1, device=device)], _SUM)
    if throws:
        stop = torch.zeros(1, device=device)
        group.allreduce([stop], _SUM).wait()
        stopped = int(group.to_host(stop))
        if stopped:
            raise UnevenInputsError(
                f"[rank {group.rank()}] Detected at least one rank that exhausted inputs. Throwing "
                f"across all ranks. {stopped} of {group.size()} did, and throw_on_early_termination is set"
            )
    return work


def _kind(joinable: object) -> str:
    return type(joinable).__name__


def _group_of(joinables: Sequence[Any]) -> ProcessGroup:
    """Returns the ranks that joinables have in common.

    Raises:
        TypeError: an object is no joinable, or has a group of another package.
        ValueError: the groups differ.
    """
    groups = []
    for joinable in joinables:
        missing = [
            name
            for name in ("join_hook", "join_device", "join_process_group", "_join_config")
            if not hasattr(joinable, name)
        ]
        if missing:
            raise TypeError(
                f"{_kind(joinable)} is no joinable: it has no {', '.join(missing)}; derive it from Joinable, "
                "and call that one's constructor"
            )
        groups.append(resolve_group(joinable.join_process_group))
    for joinable, group in zip(joinables, groups, strict=True):
        if group is not groups[0]:
            raise ValueError(
                f"joinables must have one group, but {_kind(joinables[0])} has {groups[0].describe()} and "
                f"{_kind(joinable)} has {group.describe()}"
            )
    return groups[0]
