"""The functions of the double that stand for CUDA's, and the streams that a thread puts its work on."""

from __future__ import annotations

import ctypes
import itertools
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nccl_double import accesses
from nccl_double.accesses import Range

_number = ctypes.c_ssize_t
_callback = ctypes.CFUNCTYPE(None, _number)
_accesses = ctypes.c_char_p, ctypes.POINTER(Range), ctypes.c_size_t
_memory = ctypes.c_size_t, ctypes.c_size_t
_streams = ctypes.POINTER(_number)
_SIGNATURES = {
    "stream_create": (_number,),
    "stream_call": (ctypes.c_int, _number, _callback, _number, *_accesses),
    "stream_settle": (ctypes.c_int, _number),
    "stream_sleep": (ctypes.c_int, _number, ctypes.c_int),
    "stream_synchronize": (ctypes.c_int, _number),
    "event_create": (_number,),
    "event_destroy": (ctypes.c_int, _number),
    "event_record": (ctypes.c_int, _number, _number),
    "event_wait": (ctypes.c_int, _number, _number),
    "tell": (ctypes.c_int, ctypes.c_int),
    "refuse_to_wait": (ctypes.c_int, ctypes.c_int),
    "set_device": (ctypes.c_int, ctypes.c_int),
    "capture_begin": (ctypes.c_int, _number, ctypes.c_int),
    "capturing": (ctypes.c_int, _number),
    "capture_end": (_number, _number),
    "graph_launch": (ctypes.c_int, _number, _number),
    "graph_destroy": (ctypes.c_int, _number),
    "access": (ctypes.c_int, _number, *_accesses),
    "access_more": (ctypes.c_int, *_accesses),
    "forget_accesses": (ctypes.c_int, *_memory),
    "give_back": (ctypes.c_int, _streams, ctypes.c_size_t, ctypes.c_char_p, *_memory),
    "watch_accesses": (ctypes.c_int, ctypes.c_int),
    "races": (ctypes.c_char_p,),
}
"""Result and arguments of the double's functions."""

thread = threading.local()
"""Of each thread: ``stream``, its current one, and ``graph``, which it captures."""
_calls: dict[int, tuple[Callable[[], object], str]] = {}
captured: dict[int, tuple[Callable[[], object], str]] = {}
"""What nodes of graphs call, again and again, and its name."""
_failures: list[str] = []
"""What streams met in functions that they called."""
_numbers = itertools.count(1)
functions: dict[str, Any] = {}
"""The double's functions, by name."""
loaded_from: list[Path] = []
"""The file that the double was loaded from."""
_default: list[int] = []
"""The default stream, once there is one."""
_pool: list[int] = []
_next_of_pool = itertools.cycle(range(32))

CUDA_ERRORS = {
    800: "this thread would wait for a stream",
    900: "not permitted when a stream is captured",
    901: "a forbidden call has broken the capture off",
    903: "the capture was begun on another stream",
    904: "a stream of the capture has work that its first stream did not join",
    905: "an event from outside would become part of the capture",
    907: "not permitted on an event that was recorded in a capture",
}


@_callback
def _run(number: int) -> None:
    function, what = captured[number] if number in captured else _calls.pop(number)
    try:
        with torch.no_grad():
            function()
    except Exception as error:  # noqa: BLE001 - nobody waits for it here
        _failures.append(f"{what}: {type(error).__name__}: {error}")
        traceback.print_exc()


def use(path: Path) -> None:
    """Takes the double that this process has loaded from a file."""
    loaded_from[:] = [path]
    loaded = ctypes.CDLL(str(path))
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, f"double_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function


def do(name: str, *arguments: object) -> int:
    """Calls a function of the double.

    Raises:
        RuntimeError: the call is forbidden, as in a capture.
    """
    result = int(functions[name](*arguments))
    if -result in CUDA_ERRORS:
        raise RuntimeError(f"double_{name}{arguments}: {CUDA_ERRORS[-result]} ({-result})")
    assert result >= 0, f"double_{name}{arguments}: there is no such stream or event"
    return result


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
