"""What a message says about an operation of a group that another library carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

__all__ = ["Operation"]


@dataclass(frozen=True, slots=True)
class Operation:
    """What a message says about an operation.

    Attributes:
        name: name of its user function.
        number: its place among the operations that the group issued.
        outputs: the tensors it writes or sends.
        timeout: its time limit.
        detail: what else tells it apart, such as the reduction or the peer.
    """

    name: str
    number: int
    outputs: Sequence[torch.Tensor]
    timeout: timedelta
    detail: str = ""

    def __str__(self) -> str:
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in self.outputs[:1])
        more = f" and {len(self.outputs) - 1} more" if len(self.outputs) > 1 else ""
        about = ", ".join(part for part in (self.detail, shapes + more) if part)
        return f"{self.name} #{self.number}" + (f" ({about})" if about else "")
