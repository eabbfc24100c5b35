"""Signals on a device: what is written there, and when that waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collectives.ddp.sync.signals import Position, Signals

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


def transfers(signals: Signals, tail: torch.Tensor, **about: Any) -> int:
    """Returns how often writing signals waits for the device."""
    given = {"error": False, "relayout": False, "position": Position(1), "used": None, **about}
    with Transfers() as seen:
        signals.write(tail, **given)
    return seen.count


@pytest.mark.parametrize("counted", [0, 3])
def test_unchanged_signals_do_not_wait_for_the_device(counted: int) -> None:
    signals = Signals(counted)
    tail = torch.zeros(signals.size, device=DEVICE)
    used = [1, 0, 1] if counted else None
    assert transfers(signals, tail, used=used) == 1
    assert transfers(signals, tail, used=used) == 0
    assert transfers(signals, tail, used=used, error=True) == 1
    assert transfers(signals, tail, used=used, error=True) == 0
    assert transfers(signals, tail, used=used, position=Position(2)) == 1


def test_what_is_written_is_read() -> None:
    signals = Signals(3)
    tail = torch.zeros(signals.size)
    for dtype in (torch.float32, torch.bfloat16):
        tail = tail.to(dtype)
        for _ in range(2):
            signals.write(tail, error=False, relayout=True, position=Position(1), used=[1, 0, 1])
            told = signals.read(tail)
            assert (told.error, told.out_of_step, told.relayout, told.unused) == (False, False, True, {1})
            tail.zero_()
        signals.write(tail, error=True, relayout=False, position=None, used=None)
        told = signals.read(tail)
        assert (told.error, told.relayout, told.unused) == (True, False, frozenset())
    one, other = torch.zeros(2, signals.size)
    signals.write(one, error=False, relayout=False, position=Position(1), used=None)
    signals.write(other, error=False, relayout=False, position=Position(2), used=None)
    assert not signals.read(one).out_of_step
    assert signals.read((one + other) / 2).out_of_step


def test_signals_of_one_rank_tell_what_it_did_not_use() -> None:
    told = Signals(3).local([1, 0, 1])
    assert (told.error, told.out_of_step, told.relayout, told.unused) == (False, False, False, {1})
