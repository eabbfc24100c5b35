"""Errors of the runtime.

Every class is also a subclass of the class of the same meaning in ``torch.distributed``, so that handlers
written for
torch catch ours::

    torch.distributed.DistError
    └── DistError
        ├── DistBackendError (torch.distributed.DistBackendError)
        │   ├── CollectiveTimeoutError      an operation passed its time limit
        │   ├── CollectiveMismatchError     ranks issued different operations
        │   ├── PeerLostError               a rank died or left (``.rank``)
        │   ├── GroupAbortedError           the group was aborted or broken by an earlier error
        │   └── UnsupportedOperationError   (NotImplementedError) the group cannot do this
        ├── DistNetworkError (torch.distributed.DistNetworkError)
        └── DistStoreError   (torch.distributed.DistStoreError)
            └── QueueEmptyError (torch.distributed.QueueEmptyError)

Wrong arguments raise :class:`ValueError` or :class:`TypeError` before anything is sent; group and process
stay usable.
"""

from __future__ import annotations

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
    """Base of all errors that the runtime raises beyond wrong arguments."""


class DistBackendError(DistError, _torch_distributed.DistBackendError):
    """A process group could not carry out an operation."""


class CollectiveTimeoutError(DistBackendError):
    """An operation passed its time limit; the message says for every rank what it waits in or did last.

    The group is broken afterwards: later calls raise :class:`GroupAbortedError` with this cause.
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

    Attributes:
        rank: the lost rank, counted within the group; -1 where the backend cannot tell.
    """

    def __init__(self, message: str = "", rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerLostError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


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
