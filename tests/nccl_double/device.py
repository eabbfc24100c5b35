"""The streams and events of the double of NCCL as a device, so that groups run on tensors of the CPU.

Streams are threads, which run behind the calls as a GPU does. So is the default one, which all threads share,
the current one unless :meth:`DoubleDevice.using` says otherwise.

Inside :func:`tensors_on_device`, torch's operations of the calling thread go to its current stream, too:
those that only write to their first argument are put there and return, and all others block the host until
the stream is idle. Nothing else blocks: whoever reads what another stream has yet to write, reads too early.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    "set_device": (ctypes.c_int, ctypes.c_int),
}
"""Result and arguments of the double's functions."""

_thread = threading.local()
_calls: dict[int, Callable[[], object]] = {}
_numbers = itertools.count(1)
_functions: dict[str, Any] = {}
_default: list[int] = []
"""The default stream, once there is one."""

_QUEUED = frozenset({"copy_", "fill_", "zero_", "add_", "sub_", "mul_", "div_", "neg_"})
"""Operations that write to their first argument and do nothing else."""

_READS = frozenset({torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""Methods that need the values on the host, and read them without an operation."""


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


def _current_stream() -> int:
    if not _default:
        _default.append(_do("stream_create"))
    return getattr(_thread, "stream", _default[0])


def _enqueue(stream: int, function: Callable[[], object]) -> None:
    number = next(_numbers)
    _calls[number] = function
    _do("stream_call", stream, _run, number)


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if func.is_view:
            return call()
        if func.overloadpacket.__name__ in _QUEUED:
            _enqueue(_current_stream(), call)
            return args[0]
        if any(isinstance(value, torch.Tensor) for value in tree_leaves((args, kwargs))):
            _do("stream_synchronize", _current_stream())
        return call()


class _Reads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            _do("stream_synchronize", _current_stream())
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def tensors_on_device() -> Iterator[None]:
    """Lets torch's operations of this thread run as those on tensors of a device."""
    with _Reads(), _Operations():
        yield


class DoubleDevice(Device):
    """The CPU with the double's streams. It is device 1; threads begin on another rank's, device 0."""

    kind = "cpu"
    number: ClassVar[int] = 1
    priorities: ClassVar[list[bool]] = []
    """Of the streams that were made, whether they should have a high priority."""

    @classmethod
    def current(cls) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def reduces_float8() -> bool:
        return True

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        before = _do("set_device", self.number)
        try:
            yield
        finally:
            _do("set_device", before)

    def current_stream(self) -> int:
        return _current_stream()

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """Makes a stream the thread's current one."""
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
        _enqueue(stream, function)

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
        _do("set_device", self.number)
