"""What calls of the nccl backend cost the host."""

from __future__ import annotations

import sys

from collectives.bench.acceptance.command import measure_host_cost

MOST = {
    "all_reduce, asynchronous": (40, 45),
    "all_reduce, synchronous": (41, 54),
    "all_reduce of 10, coalesced": (50, 177),  # ten of them find out whether the tensors have memory
}
"""Frames of Python and calls of C functions that each call may take; to be lowered, and not raised."""

MORE_SEEN = 3 if sys.version_info >= (3, 14) else 0
"""From 3.14 on, profilers see the four entries into ``with`` blocks, and not the making of the lock."""


def test_what_calls_cost():
    first, second = (measure_host_cost(1) for _ in range(2))
    assert [(one.frames, one.c_calls) for one in first] == [(one.frames, one.c_calls) for one in second]
    for cost in first:
        frames, c_calls = MOST[cost.call]
        assert cost.frames <= frames
        assert cost.c_calls <= c_calls + MORE_SEEN
