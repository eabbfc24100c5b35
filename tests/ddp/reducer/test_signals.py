"""Signals on a device: what is written there, and when that waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collectives.ddp.reducer.backward_pass import Position
from collectives.ddp.reducer.end_of_pass import Signals

CPU, DEVICE = torch.device("cpu"), torch.device("meta")


class Transfers(TorchDispatchMode):
    """Counts the operations that take tensors of the host and of a device, and so wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        values = tree_leaves((args, kwargs, result))
        self.count += len({one.device for one in values if isinstance(one, torch.Tensor)}) > 1
        return result


PLAIN: dict[str, Any] = {
    "error": False, "relayout": False, "waits": False, "position": Position(1), "used": None,
}  # fmt: skip


def transfers(signals: Signals, tail: torch.Tensor, **about: Any) -> int:
    """Returns how often writing signals waits for the device."""
    with Transfers() as seen:
        signals.write(tail, **{**PLAIN, **about})
    return seen.count


@pytest.mark.parametrize("counted", [0, 3])
def test_unchanged_signals_do_not_wait_for_the_device(counted: int) -> None:
    signals = Signals(counted)
    tail = torch.zeros(signals.size, device=DEVICE)
    used = [1, 0, 1] if counted else None
    waits = 1 if counted else 0  # numbers of uses come from the host
    assert transfers(signals, tail, used=used) == waits
    assert transfers(signals, tail, used=used) == 0
    assert transfers(signals, tail, used=used, error=True) == waits
    assert transfers(signals, tail, used=used, error=True) == 0
    assert transfers(signals, tail, used=used, position=Position(2)) == waits
    assert transfers(signals, tail, position=Position(3)) == 0


def test_what_is_captured_reads_no_memory_of_the_signals() -> None:
    """Which is given back when others are kept, while the graph goes on."""
    signals = Signals(2)
    tail = torch.zeros(signals.size)
    signals.write(tail, **PLAIN)

    class Sources(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            sources.extend(one for one in tree_leaves(args[1:]) if isinstance(one, torch.Tensor))
            return func(*args, **(kwargs or {}))

    sources: list[torch.Tensor] = []
    kept = tail.clone()
    with Sources():
        signals.write(tail.zero_(), captured=True, **PLAIN)
    assert torch.equal(tail, kept)
    assert sources == []


def test_what_is_written_is_read() -> None:
    signals = Signals(3)
    tail = torch.zeros(signals.size)
    for dtype in (torch.float32, torch.bfloat16):
        tail = tail.to(dtype)
        for _ in range(2):
            signals.write(tail, **{**PLAIN, "relayout": True, "used": [1, 0, 1]})
            told = signals.read(tail)
            assert (told.errors, told.out_of_step, told.relayout, told.unused) == ([], False, True, {1})
            tail.zero_()
        signals.write(tail, **{**PLAIN, "error": True, "position": None})
        told = signals.read(tail)
        assert (told.errors, told.relayout, told.unused) == ([0], False, frozenset())
    one, other = torch.zeros(2, signals.size)
    signals.write(one, **PLAIN)
    signals.write(other, **{**PLAIN, "position": Position(2)})
    assert not signals.read(one).out_of_step
    assert signals.read((one + other) / 2).out_of_step


def test_each_rank_may_have_a_signal_for_its_errors() -> None:
    ranks = [Signals(0, 3, rank) for rank in range(3)]
    tails = torch.zeros(3, ranks[0].size)
    for rank, signals in enumerate(ranks):
        signals.write(tails[rank], **{**PLAIN, "error": rank > 0})
    assert ranks[0].read(tails.mean(0)).errors == [1, 2]
    assert ranks[0].read(tails[0]).errors == []
