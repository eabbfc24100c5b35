"""An operation of a group that another library carries out, for messages and for the flight record."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from collectives.core.operations import Call
from collectives.core.recording.flight_record import FlightRecord, RecordedOperation

_MESSAGES = frozenset({"send", "recv"})
_NEEDS_ALL = ("all_", "barrier", "reduce_scatter")


class Operation:
    """An operation as error messages name it.

    Args:
        record: the flight record of its group.
        name: name of its user function.
        number: its place among the operations that the group issued; 0 for one that has none yet.
        tensors: the tensors that messages describe; not kept.
        timeout: its time limit.
        detail: what else tells it apart, such as the reduction or the peer.
        outputs: the results of its Work, where that takes them from here.
    """

    __slots__ = (
        "_count", "_dtype", "_nbytes", "_record", "_shape", "detail", "name", "number", "outputs", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        record: FlightRecord,
        name: str,
        number: int,
        tensors: Sequence[torch.Tensor],
        timeout: timedelta,
        detail: str = "",
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        self._record = record
        self.name = name
        self.number = number
        self.timeout = timeout
        self.detail = detail
        self.outputs = outputs
        self._count = len(tensors)
        self._dtype = tensors[0].dtype if tensors else None
        self._shape = tensors[0].shape if tensors else ()
        self._nbytes = 0
        for tensor in tensors:
            self._nbytes += tensor.nbytes

    def begin(self) -> RecordedOperation:
        """Enters it, or a part of it, into the flight record; whoever carries it out ends it there."""
        begun = RecordedOperation(
            self._record,
            self.name,
            self.number,
            self.detail,
            self._shape if self._count else None,
            self._dtype if self._count else "",
            self._count,
            self._nbytes,
            self.timeout,
        )
        self._record.begin(begun)
        return begun

    def replayed(self) -> Operation:
        """Returns the operation as it is in a replay of the CUDA graph that it was captured into."""
        again = copy.copy(self)
        again.detail = ", ".join(filter(None, (self.detail, "in a CUDA graph")))
        return again

    @property
    def about(self) -> dict[str, Any]:
        """The attributes of an error that tell the operation."""
        return {"operation": self.name, "sequence": self.number}

    @property
    def is_message(self) -> bool:
        """Whether it is a message of the user's, and not a collective."""
        return self.name in _MESSAGES

    @property
    def needs_all(self) -> bool:
        """Whether no rank leaves it before all have come."""
        return self.name.startswith(_NEEDS_ALL)

    @property
    def short(self) -> str:
        """Name and number."""
        return f"{self.name} #{self.number}" if self.number else self.name

    def __str__(self) -> str:
        tensor = f"{self._dtype} {list(self._shape)}" if self._count else ""
        more = f" and {self._count - 1} more" if self._count > 1 else ""
        about = ", ".join(part for part in (self.detail, tensor + more) if part)
        return self.short + (f" ({about})" if about else "")


class Operations:
    """Numbers the operations of one group: messages apart from collectives.

    Args:
        record: the flight record of the group.
    """

    def __init__(self, record: FlightRecord) -> None:
        self._record = record
        self.collectives = itertools.count(1)
        self.messages = itertools.count(1)

    def of(self, call: Call, timeout: timedelta) -> Operation:
        """Returns the next operation, which is a collective.

        Args:
            call: what is called.
            timeout: the group's limit, where the call has none.
        """
        name, shown = call.operation.name, call.shown
        return self(name, call.outputs, call.timeout or timeout, call.detail, shown)

    def __call__(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        timeout: timedelta,
        detail: str = "",
        shown: Sequence[torch.Tensor] = (),
    ) -> Operation:
        """Returns the next operation; arguments as :class:`Operation`.

        Args besides those:
            shown: the tensors that messages describe, where they are not the outputs.
        """
        number = next(self.messages if name in _MESSAGES else self.collectives)
        return Operation(self._record, name, number, shown or outputs, timeout, detail, outputs)
