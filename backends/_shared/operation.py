"""What a message says about an operation of a group that another library carries out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

__all__ = ["Operation"]


_NEEDS_ALL = ("all_", "barrier", "reduce_scatter")


class Operation:
    """An operation as error messages name it.

    Args:
        name: name of its user function.
        number: its place among the operations that the group issued.
        tensors: the tensors that messages describe; not kept.
        timeout: its time limit.
        detail: what else tells it apart, such as the reduction or the peer.
        outputs: the results of its Work, where that takes them from here.
    """

    __slots__ = ("_count", "_dtype", "_shape", "detail", "name", "number", "outputs", "timeout")

    def __init__(
        self,
        name: str,
        number: int,
        tensors: Sequence[torch.Tensor],
        timeout: timedelta,
        detail: str = "",
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        self.name = name
        self.number = number
        self.timeout = timeout
        self.detail = detail
        self.outputs = outputs
        self._count = len(tensors)
        self._dtype = tensors[0].dtype if tensors else None
        self._shape = tensors[0].shape if tensors else ()

    @property
    def about(self) -> dict[str, Any]:
        """The attributes of an error that tell the operation."""
        return {"operation": self.name, "sequence": self.number}

    @property
    def needs_all(self) -> bool:
        """Whether no rank leaves it before all have come."""
        return self.name.startswith(_NEEDS_ALL)

    @property
    def short(self) -> str:
        """Name and number."""
        return f"{self.name} #{self.number}"

    def __str__(self) -> str:
        tensor = f"{self._dtype} {list(self._shape)}" if self._count else ""
        more = f" and {self._count - 1} more" if self._count > 1 else ""
        about = ", ".join(part for part in (self.detail, tensor + more) if part)
        return self.short + (f" ({about})" if about else "")
