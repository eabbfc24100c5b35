"""The streams that a thread puts its work on, and what they call."""

from __future__ import annotations

import ctypes
import itertools
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nccl_double import accesses, do
from nccl_double.accesses import Range

_callback = ctypes.CFUNCTYPE(None, ctypes.c_ssize_t)

thread = threading.local()
"""Of each thread: ``stream``, its current one, and ``graph``, which it captures."""
_calls: dict[int, tuple[Callable[[], object], str]] = {}
captured: dict[int, tuple[Callable[[], object], str]] = {}
"""What nodes of graphs call, again and again, and its name."""
_failures: list[str] = []
"""What streams met in functions that they called."""
_numbers = itertools.count(1)
_default: list[int] = []
"""The default stream, once there is one."""
_pool: list[int] = []
_next_of_pool = itertools.cycle(range(32))


@_callback
def _run(number: int) -> None:
    function, what = captured[number] if number in captured else _calls.pop(number)
    try:
        with torch.no_grad():
            function()
    except Exception as error:  # noqa: BLE001 - nobody waits for it here
        _failures.append(f"{what}: {type(error).__name__}: {error}")
        traceback.print_exc()


def current_stream() -> int:
    """Returns the stream that the calling thread puts its work on."""
    if not _default:
        _default.append(do("stream_create"))
    return getattr(thread, "stream", _default[0])


def pool_stream() -> int:
    """Returns the next stream of torch's pool, as ``torch.cuda.Stream()``: every 32nd is the same one."""
    if not _pool:
        _pool.extend(do("stream_create") for _ in range(32))
    return _pool[next(_next_of_pool)]


def noted(what: str, ranges: Sequence[Range]) -> tuple[bytes, Any, int]:
    """Returns accesses as the double takes them."""
    return f"{what} at {accesses.caller()}".encode(), (Range * len(ranges))(*ranges), len(ranges)


def enqueue(
    stream: int, function: Callable[[], object], what: str = "", ranges: Sequence[Range] = ()
) -> None:
    """Lets a stream call a function, an operation that accesses memory."""
    number = next(_numbers)
    called = function, f"{what or 'a function'} at {accesses.caller()}"
    graph = getattr(thread, "graph", None)
    if graph is not None and do("capturing", stream):
        graph.calls.append(number)
        captured[number] = called
    else:
        _calls[number] = called
    do("stream_call", stream, _run, number, *noted(what, ranges))


def take_failures() -> str:
    """Returns the errors that streams met and that were not returned before, a line each."""
    found = "\n".join(_failures)
    _failures.clear()
    return found


def is_capturing() -> bool:
    """Returns whether the calling thread's current stream is being captured."""
    return bool(do("capturing", current_stream()))
