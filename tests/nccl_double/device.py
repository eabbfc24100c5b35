"""The streams and events of the double of NCCL as a device, so that groups run on tensors of the CPU.

Stream 0, the current one of a thread unless :meth:`DoubleDevice.using` says otherwise, is the thread itself:
what is issued to it has run when the call returns, and waiting for an event blocks. Other streams are
threads, which run behind the calls as a GPU does.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from collectives.backends.nccl.device import Device

_number = ctypes.c_ssize_t
_callback = ctypes.CFUNCTYPE(None, _number)
_SIGNATURES = {
    "stream_create": (_number,),
    "stream_call": (ctypes.c_int, _number, _callback, _number),
    "stream_sleep": (ctypes.c_int, _number, ctypes.c_int),
    "stream_synchronize": (ctypes.c_int, _number),
    "event_create": (_number,),
    "event_record": (ctypes.c_int, _number, _number),
    "event_wait": (ctypes.c_int, _number, _number),
    "event_query": (ctypes.c_int, _number),
}
"""Result and arguments of the double's functions."""

_thread = threading.local()
_calls: dict[int, Callable[[], object]] = {}
_numbers = itertools.count(1)
_functions: dict[str, Any] = {}


@_callback
def _run(number: int) -> None:
    with torch.no_grad():
        _calls.pop(number)()


def use(path: Path) -> None:
    """Takes the double that this process has loaded from a file."""
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, f"double_{name}")
        function.restype, function.argtypes = result, arguments
        _functions[name] = function


def _do(name: str, *arguments: object) -> int:
    result = int(_functions[name](*arguments))
    assert result >= 0, f"double_{name}{arguments}: there is no such stream or event"
    return result


class DoubleDevice(Device):
    """The CPU with the double's streams."""

    kind = "cpu"
    priorities: ClassVar[list[bool]] = []
    """Of the streams that were made, whether they should have a high priority."""

    @classmethod
    def current(cls) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def reduces_float8() -> bool:
        return True

    def activate(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def current_stream(self) -> int:
        return getattr(_thread, "stream", 0)

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """Makes a stream the thread's current one for the group; torch's operations stay on the thread."""
        before, _thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            _thread.stream = before

    def new_stream(self, high_priority: bool) -> int:
        self.priorities.append(high_priority)
        return _do("stream_create")

    def handle(self, stream: int) -> int:
        return stream

    def record(self, stream: int) -> int:
        event = _do("event_create")
        _do("event_record", event, stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        _do("event_wait", event, stream)

    def done(self, event: int) -> bool:
        return bool(_do("event_query", event))

    def run(self, stream: int, function: Callable[[], object]) -> None:
        number = next(_numbers)
        _calls[number] = function
        _do("stream_call", stream, _run, number)

    def sleep(self, stream: int, seconds: float) -> None:
        """Lets a stream do nothing for a while."""
        _do("stream_sleep", stream, int(seconds * 1000))

    def synchronize(self, stream: int) -> None:
        """Blocks until a stream has passed what it holds."""
        _do("stream_synchronize", stream)

    def empty(self, stream: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def share(self, stream: int, tensor: torch.Tensor) -> None:
        pass  # drop keeps tensors until the stream has passed

    def drop(self, stream: int, tensors: list[torch.Tensor]) -> None:
        self.run(stream, tensors.clear)

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def capturing(self) -> bool:
        return False

    def tolerate_captures(self) -> None:
        pass
