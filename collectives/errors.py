"""Errors of the runtime.

Every class is also a subclass of the class of the same meaning in ``torch.distributed``, so that handlers
written for
torch catch ours::

    torch.distributed.DistError
    └── DistError
        ├── DistBackendError (torch.distributed.DistBackendError)
        │   ├── CollectiveTimeoutError      an operation passed its time limit
        │   ├── CollectiveMismatchError     ranks issued different operations
        │   ├── PeerLostError               a rank died or left
        │   ├── GroupAbortedError           the group was aborted or broken by an earlier error
        │   └── UnsupportedOperationError   (NotImplementedError) the group cannot do this
        ├── DistNetworkError (torch.distributed.DistNetworkError)
        └── DistStoreError   (torch.distributed.DistStoreError)
            └── QueueEmptyError (torch.distributed.QueueEmptyError)

All say in attributes of :class:`DistError` what a program may want to know: which rank is at fault, which
did not come, in which operation that was found, and which error came first.

Wrong arguments raise :class:`ValueError` or :class:`TypeError` before anything is sent; group and process
stay usable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch.distributed as _torch_distributed

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "GroupAbortedError",
    "PeerLostError",
    "QueueEmptyError",
    "UnsupportedOperationError",
]


class DistError(_torch_distributed.DistError):
    """Base of all errors that the runtime raises beyond wrong arguments.

    Ranks are counted within the group that raises. Attributes have their defaults where nothing is known:
    what a backend can tell, the guide says. They survive :mod:`pickle`.

    Attributes:
        rank: the rank at fault: that died, aborted, failed, or for which the others waited until their time
            limit; -1 where it is not known.
        missing_ranks: the ranks that had not come when a time limit passed, ascending; the first 64.
        operation: name of the operation in which the failure was found, such as ``"all_reduce"``.
        sequence: its number within the group, as the message has it; -1 for operations without one.
        cause: the error that came first, with attributes of its own, where this one comes of it: of a
            :class:`GroupAbortedError` what broke the group, or the exception for which a rank aborted, as
            :class:`DistError` with its class and text.
    """

    def __init__(
        self,
        message: str = "",
        rank: int = -1,
        *,
        missing_ranks: Iterable[int] = (),
        operation: str = "",
        sequence: int = -1,
        cause: DistError | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.missing_ranks = tuple(missing_ranks)
        self.operation = operation
        self.sequence = sequence
        self.cause = cause

    def details(self) -> dict[str, Any]:
        """Returns rank, missing ranks, operation and sequence by name, as JSON can hold them."""
        return {
            "rank": self.rank,
            "missing_ranks": list(self.missing_ranks),
            "operation": self.operation,
            "sequence": self.sequence,
        }


class DistBackendError(DistError, _torch_distributed.DistBackendError):
    """A process group could not carry out an operation."""


class CollectiveTimeoutError(DistBackendError):
    """An operation, or a wait with a limit of its own, passed its time limit.

    The message says what the other ranks were doing, as far as the backend knows. After a collective that
    timed out the group is broken: later calls raise :class:`GroupAbortedError` with this cause.
    """


class CollectiveMismatchError(DistBackendError):
    """Ranks issued different operations at one place of the order; raised on all ranks with a table of them.

    No output was written and the group stays usable.
    """


class PeerLostError(DistBackendError):
    """A rank of the group died or left while others still needed it; raised on every rank that is left.

    The group is broken afterwards: later calls raise this class again, with the same ``rank``, whether or not
    the caller took part in the operation that found the loss. After :meth:`ProcessGroup.abort` or
    ``shutdown`` on this rank they raise :class:`GroupAbortedError`. The others go on with a new group.

    A live rank is named only if its machine could not be reached for some five seconds. The rank is -1 where
    the backend cannot tell which one is lost.
    """


class GroupAbortedError(DistBackendError):
    """The group was aborted, shut down, or broken by an earlier error; the message names the first cause.

    Of a group that has lost a rank, later calls raise :class:`PeerLostError` instead, until it is aborted or
    shut down here.
    """


class UnsupportedOperationError(DistBackendError, NotImplementedError):
    """The group does not offer this operation, data type, reduction or device; nothing was sent."""


class DistNetworkError(DistError, _torch_distributed.DistNetworkError):
    """A connection could not be made or broke."""


class DistStoreError(DistError, _torch_distributed.DistStoreError):
    """A store did not answer, or a key did not appear within the time limit."""


class QueueEmptyError(DistStoreError, _torch_distributed.QueueEmptyError):
    """A non-blocking ``queue_pop`` found the queue empty."""


def ranks_in_words(ranks: Collection[int]) -> str:
    """Returns ``"rank 3"`` or ``"ranks 0, 3"``, for the runtime's own messages."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
