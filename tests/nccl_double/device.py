"""The streams and events of the double of NCCL as a device, so that groups run on tensors of the CPU.

Streams are threads, which run behind the calls as a GPU does. So is the default one, which all threads share,
the current one unless :meth:`DoubleDevice.using` says otherwise. Users' streams come from a pool of 32, as
torch's do, which begins again after the last: see :func:`pool_stream`.

Inside :func:`tensors_on_device`, torch's operations of the calling thread go to its current stream, too:
those that only write to their first argument are put there and return, and all others block the host until
the stream is idle. Nothing else blocks: whoever reads what another stream has yet to write, reads too early.

Inside, too, the double finds what no stream, event or wait of the host orders, however it happens to run:
memory that two operations use, one of which writes. The end of :func:`tensors_on_device` raises with it.

Inside :meth:`Graph.capture`, no operation is carried out, but each is noted in the graph, and what would read
values on the host raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from collectives.backends.nccl.device import Device
from collectives.core import work
from nccl_double import accesses
from nccl_double.accesses import Range

_number = ctypes.c_ssize_t
_callback = ctypes.CFUNCTYPE(None, _number)
_accesses = ctypes.c_char_p, ctypes.POINTER(Range), ctypes.c_size_t
_SIGNATURES = {
    "stream_create": (_number,),
    "stream_call": (ctypes.c_int, _number, _callback, _number, *_accesses),
    "stream_settle": (ctypes.c_int, _number),
    "stream_sleep": (ctypes.c_int, _number, ctypes.c_int),
    "stream_synchronize": (ctypes.c_int, _number),
    "event_create": (_number,),
    "event_record": (ctypes.c_int, _number, _number),
    "event_wait": (ctypes.c_int, _number, _number),
    "event_query": (ctypes.c_int, _number),
    "event_synchronize": (ctypes.c_int, _number),
    "set_device": (ctypes.c_int, ctypes.c_int),
    "capture_begin": (ctypes.c_int, _number),
    "capturing": (ctypes.c_int, _number),
    "capture_end": (_number, _number),
    "graph_launch": (ctypes.c_int, _number, _number),
    "graph_destroy": (ctypes.c_int, _number),
    "access": (ctypes.c_int, _number, *_accesses),
    "access_more": (ctypes.c_int, *_accesses),
    "forget_accesses": (ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t),
    "watch_accesses": (ctypes.c_int, ctypes.c_int),
    "races": (ctypes.c_char_p,),
}
"""Result and arguments of the double's functions."""

_thread = threading.local()
_calls: dict[int, Callable[[], object]] = {}
_captured: dict[int, Callable[[], object]] = {}
"""What nodes of graphs call, again and again."""
_numbers = itertools.count(1)
_functions: dict[str, Any] = {}
_collect_all = torch.futures.collect_all
_default: list[int] = []
"""The default stream, once there is one."""
_pool: list[int] = []
_next_of_pool = itertools.cycle(range(32))

_QUEUED = frozenset({"copy_", "fill_", "zero_", "add_", "sub_", "mul_", "div_", "neg_"})
"""Operations that write to their first argument and do nothing else."""

_READS = frozenset({torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""Methods that need the values on the host, and read them without an operation."""

_ANSWERS = frozenset(
    {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}
)
"""Operations that tell the host something about values, for which it waits."""

_POISON = 0xA5
"""Every byte of memory that was given back."""

_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

_CAPTURE_ERRORS = {
    900: "not permitted when a stream is captured",
    901: "a forbidden call has broken the capture off",
    903: "the capture was begun on another stream",
    904: "a stream of the capture has work that its first stream did not join",
    905: "an event from outside would become part of the capture",
    907: "not permitted on an event that was recorded in a capture",
}


@_callback
def _run(number: int) -> None:
    with torch.no_grad():
        (_captured[number] if number in _captured else _calls.pop(number))()


def use(path: Path) -> None:
    """Takes the double that this process has loaded from a file."""
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, f"double_{name}")
        function.restype, function.argtypes = result, arguments
        _functions[name] = function


def _do(name: str, *arguments: object) -> int:
    result = int(_functions[name](*arguments))
    if -result in _CAPTURE_ERRORS:
        raise RuntimeError(f"double_{name}{arguments}: {_CAPTURE_ERRORS[-result]} ({-result})")
    assert result >= 0, f"double_{name}{arguments}: there is no such stream or event"
    return result


def _current_stream() -> int:
    if not _default:
        _default.append(_do("stream_create"))
    return getattr(_thread, "stream", _default[0])


def pool_stream() -> int:
    """Returns the next stream of torch's pool, as ``torch.cuda.Stream()``: every 32nd is the same one."""
    if not _pool:
        _pool.extend(_do("stream_create") for _ in range(32))
    return _pool[next(_next_of_pool)]


def _noted(what: str, ranges: Sequence[Range]) -> tuple[bytes, Any, int]:
    """Returns accesses as the double takes them."""
    return f"{what} at {accesses.caller()}".encode(), (Range * len(ranges))(*ranges), len(ranges)


def _forget(tensor: torch.Tensor) -> None:
    _do("forget_accesses", *accesses.memory_of(tensor))


def _enqueue(
    stream: int, function: Callable[[], object], what: str = "", ranges: Sequence[Range] = ()
) -> None:
    number = next(_numbers)
    graph: Graph | None = getattr(_thread, "graph", None)
    if graph is not None and _do("capturing", stream):
        graph.calls.append(number)
        _captured[number] = function
    else:
        _calls[number] = function
    _do("stream_call", stream, _run, number, *_noted(what, ranges))


def _carry_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operation that autograd knows of since it was put on its stream."""
    with torch._C._ExcludeDispatchKeyGuard(_VERSIONS):
        return func(*args, **kwargs)


def _give_back(tensors: list[torch.Tensor]) -> None:
    """Empties a list; memory that nobody has then is overwritten, as by who would get it next."""
    while tensors:
        tensor = tensors.pop()
        storage = tensor.untyped_storage()
        held_by_these = 2  # the tensor and the object for its storage
        if sys.getrefcount(tensor) == 2 and torch._C._storage_Use_Count(storage._cdata) <= held_by_these:
            storage.fill_(_POISON)


def _is_capturing() -> bool:
    return bool(_do("capturing", _current_stream()))


def _capture(func: Any, args: Any, kwargs: Any) -> Any:
    """Notes an operation in the graph; returns tensors that each replay writes to."""
    call = partial(_carry_out, func, args, kwargs)
    name, ranges = str(func), accesses.of_call(func, args, kwargs)
    if func in _ANSWERS:
        raise RuntimeError("reading a value on the host is not permitted when a stream is captured")
    if func._schema.is_mutable:
        _enqueue(_current_stream(), call, name, ranges)
        about = func._schema.arguments
        written = [given for given, one in zip(args, about, strict=False) if one.is_write]
        written += [kwargs[one.name] for one in about if one.is_out]
        return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
    results = call()  # shapes, and memory; their values are those of now
    into, spec = tree_flatten(results)

    def replay() -> None:
        for old, new in zip(into, tree_flatten(call())[0], strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)

    made = accesses.new_memory(func, args, kwargs, results)
    for tensor in made:
        _forget(tensor)
    _enqueue(_current_stream(), replay, name, ranges + accesses.of_new(func, made))
    return tree_unflatten(into, spec)


class Graph:
    """Operations that can be carried out again and again, as a ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.kept: list[object] = []
        self._number = 0

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Captures what this thread does, on a new stream that becomes the current one."""
        before, stream = _current_stream(), _do("stream_create")
        _do("stream_synchronize", before)
        _do("capture_begin", stream)
        _thread.stream, _thread.graph = stream, self
        try:
            yield
        finally:
            _thread.stream, _thread.graph = before, None
            ended = int(_functions["capture_end"](stream))
        self._number = ended
        if ended < 0:
            raise RuntimeError(f"the capture has failed: {_CAPTURE_ERRORS[-ended]} ({-ended})")

    def replay(self) -> None:
        """Carries the graph out on the current stream, behind what that holds; does not block."""
        _do("graph_launch", self._number, _current_stream())

    def reset(self) -> None:
        """Lets the graph go, after what was replayed."""
        _do("stream_synchronize", _current_stream())
        _do("graph_destroy", self._number)
        for number in self.calls:
            del _captured[number]
        self.calls, self.kept = [], []


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        stream, given = _current_stream(), accesses.tensors_in((args, kwargs))
        ranges = accesses.of_call(func, args, kwargs)
        if given and all(accesses.is_on_host(tensor) for tensor in given):
            _do("access", 0, *_noted(str(func), ranges))
            return func(*args, **kwargs)
        if _is_capturing():
            return _capture(func, args, kwargs)
        if func.overloadpacket.__name__ in _QUEUED:
            _enqueue(stream, partial(_carry_out, func, args, kwargs), str(func), ranges)
            return args[0]
        if given:
            _do("stream_synchronize" if func in _ANSWERS else "stream_settle", stream)
        results = func(*args, **kwargs)
        made = accesses.new_memory(func, args, kwargs, results)
        for tensor in made:
            _forget(tensor)
        _do("access", stream, *_noted(str(func), ranges + accesses.of_new(func, made)))
        return results


class _Steps(TorchDispatchMode):
    """Notes what operations access that a stream carries out one after the other as one task."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if not func.is_view:
            made = accesses.new_memory(func, args, kwargs, results)
            for tensor in made:
                _forget(tensor)
            ranges = accesses.of_call(func, args, kwargs) + accesses.of_new(func, made)
            _do("access_more", *_noted(str(func), ranges))
        return results


class _Reads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            ranges = list(accesses.of_tensor(args[0], False))
            if accesses.is_on_host(args[0]):
                _do("access", 0, *_noted(func.__name__, ranges))
            else:
                _do("access", _current_stream(), *_noted(func.__name__, ranges))
                _do("stream_synchronize", _current_stream())  # raises in a capture
        return func(*args, **(kwargs or {}))


_watches = 0
"""How many contexts of :func:`tensors_on_device` there are."""
_watching = threading.Lock()


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    global _watches
    with _watching:
        if _watches == 0:
            _do("watch_accesses", 1)
        _watches += 1
    try:
        yield
    except BaseException:
        sys.stderr.write(races())  # what may have led to it
        raise
    finally:
        with _watching:
            _watches -= 1
            found = races()
            if _watches == 0:
                _do("watch_accesses", 0)
    assert not found, found


def races() -> str:
    """Returns the accesses in no order that were found and not returned before, a line each."""
    return str(_functions["races"]().decode())


@contextlib.contextmanager
def tensors_on_device() -> Iterator[None]:
    """Lets torch's operations of this thread run as those on tensors of a device, and futures of Works so.

    Raises:
        AssertionError: at the end: operations accessed memory in no order.
    """
    with (
        _watched(),
        mock.patch.object(work, "Future", DoubleFuture),
        mock.patch.object(torch.futures, "collect_all", collect_all),
        _Reads(),
        _Operations(),
    ):
        yield


class DoubleFuture(torch.futures.Future[Any]):
    """A future of tensors on a device, as torch's: complete as soon as it has a value.

    Streams of those who wait for the value wait for the stream that it was set on. Callbacks run at once, on
    a stream of torch's pool, which has others' work to do before theirs.
    """

    def __init__(self, *, devices: object = None) -> None:
        super().__init__()
        self._event: int | None = None

    def set_result(self, result: Any) -> None:
        self._event = _do("event_create")
        _do("event_record", self._event, _current_stream())
        super().set_result(result)

    def order(self, stream: int) -> None:
        """Makes a stream wait for the value."""
        if self._event is not None:
            _do("event_wait", self._event, stream)

    def wait(self) -> Any:
        value = super().wait()
        self.order(_current_stream())
        return value

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        def call(_: object) -> None:
            with _on_pool_stream([self]):
                callback(self)

        super().add_done_callback(call)

    def then(self, callback: Callable[[Any], Any]) -> DoubleFuture:
        following = DoubleFuture()

        def call(_: object) -> None:
            try:
                value = callback(self)
            except Exception as error:  # noqa: BLE001 - handed on, as torch does
                following.set_exception(error)
            else:
                following.set_result(value)

        self.add_done_callback(call)
        return following


@contextlib.contextmanager
def _on_pool_stream(futures: list[DoubleFuture]) -> Iterator[None]:
    stream, before = pool_stream(), _current_stream()
    for future in futures:
        future.order(stream)
    _do("stream_sleep", stream, 20)
    _thread.stream = stream
    try:
        yield
    finally:
        _thread.stream = before


def collect_all(futures: list[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
    """Returns a future of futures that are done, as ``torch.futures.collect_all``."""
    collected = DoubleFuture()

    def complete(_: object) -> None:
        with _on_pool_stream([future for future in futures if isinstance(future, DoubleFuture)]):
            collected.set_result(futures)

    _collect_all(futures).add_done_callback(complete)
    return collected


class DoubleDevice(Device):
    """The CPU with the double's streams. It is device 1; threads begin on another rank's, device 0."""

    kind = "cpu"
    number: ClassVar[int] = 1
    priorities: ClassVar[list[bool]] = []
    """Of the streams that were made, whether they should have a high priority."""

    @classmethod
    def shared(cls, device: torch.device) -> Device:
        # Groups are bound to cpu:0, as torch wants an index, and tensors are on cpu.
        return super().shared(torch.device("cpu") if device.index == 0 else device)

    @classmethod
    def of_rank(cls, rank: int) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def reduces_float8() -> bool:
        return True

    def enter(self) -> int:
        return _do("set_device", self.number)

    def leave(self, before: int) -> None:
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

    def _make_stream(self, high_priority: bool) -> int:
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
        def steps() -> None:
            with _Steps():
                function()

        _enqueue(stream, steps)

    def sleep(self, stream: int, seconds: float) -> None:
        """Lets a stream do nothing for a while."""
        _do("stream_sleep", stream, int(seconds * 1000))

    def synchronize(self, stream: int) -> None:
        """Blocks until a stream has passed what it holds."""
        _do("stream_synchronize", stream)

    def empty(self, stream: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(count, dtype=dtype)
        _forget(made)  # a thread of ours may ask, whose operations nobody notes
        return made

    def share(self, stream: int, tensor: torch.Tensor) -> None:
        pass  # drop keeps tensors until the stream has passed

    def drop(self, stream: int, tensors: list[torch.Tensor]) -> None:
        if _do("capturing", stream):  # the graph's own memory
            _thread.graph.kept.append(list(tensors))
            tensors.clear()
        else:
            _enqueue(stream, lambda: _give_back(tensors))

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        _forget(values)
        accesses.keep_on_host(values)
        stream = self.current_stream()
        given = tensor.detach()
        ranges = [*accesses.of_tensor(given, False), *accesses.of_tensor(values, True)]
        _enqueue(stream, lambda: values.copy_(given), "copy to the host", ranges)
        return values, self.record(stream)

    def block(self, event: int) -> None:
        _do("event_synchronize", event)

    def future(self) -> torch.futures.Future[Any]:
        return DoubleFuture()

    def capturing(self) -> bool:
        return _is_capturing()
