"""What a rank of a check has at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from collectives import ProcessGroup
from collectives.bench.acceptance.platform import Platform
from collectives.bench.acceptance.processes import write_answer
from collectives.errors import DistError

__all__ = ["Context"]


class Context:
    """A rank of a check.

    Args:
        platform: where the tensors are.
        rank: this rank.
        size: number of ranks.
        store: shared by the ranks.
        folder: where answers go.

    Attributes:
        platform: where the tensors are.
        rank: this rank.
        size: number of ranks.
        last: whether this is the rank that something happens to.
        kept: what lives as long as the process.
    """

    def __init__(self, platform: Platform, rank: int, size: int, store: Any, folder: str) -> None:
        self.platform = platform
        self.rank = rank
        self.size = size
        self.last = rank == size - 1
        self.kept: list[object] = []
        self._store = store
        self._folder = folder

    def group(self, limit_s: float = 30.0, name: str = "accepted") -> ProcessGroup:
        """Returns a new group; called by all ranks, which give each of their groups another name."""
        store = c10d.PrefixStore(name, self._store)
        return self.platform.make_group(store, self.rank, self.size, timedelta(seconds=limit_s), name)

    def connected(self, limit_s: float = 30.0, name: str = "accepted") -> ProcessGroup:
        """Returns a new group whose ranks have reduced a tensor."""
        group = self.group(limit_s, name)
        group.allreduce(self.ones(1)).wait()
        group.barrier().wait()
        return group

    def ones(self, count: int) -> torch.Tensor:
        """Returns a tensor on the device."""
        return self.full(count, 1.0)

    def full(self, count: int, value: float) -> torch.Tensor:
        """Returns a tensor of equal values on the device."""
        return torch.full((count,), value, device=self.platform.kind)

    def meet(self, name: str) -> None:
        """Waits for all ranks without communication; each name is used once."""
        self._store.set(f"{name}/{self.rank}", "here")
        self._store.wait([f"{name}/{rank}" for rank in range(self.size)])

    def tell(self, name: str) -> None:
        """Lets :meth:`hear` return on other ranks."""
        self._store.set(name, "told")

    def hear(self, name: str) -> None:
        """Waits until a rank has told."""
        self._store.wait([name])

    def answer(self, **values: Any) -> None:
        """Leaves plain values for the parent."""
        write_answer(self._folder, self.rank, values)

    def answer_error_of(self, call: Callable[[], object]) -> None:
        """Answers with the error that a call raises, and how long that took."""
        began = time.monotonic()
        try:
            call()
        except DistError as error:
            seconds = time.monotonic() - began
            self.answer(error=type(error).__name__, said=str(error), seconds=seconds)
        else:
            self.answer(error=None, said="", seconds=time.monotonic() - began)
