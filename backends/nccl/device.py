"""Streams, events and memory of a CUDA device, and whose turn it is to issue operations there.

A stream is a queue of work on a device, in order and behind the host. The current stream of a thread is where
its tensor operations go. An event is a place in a stream, for which the host and other streams can wait. The
core calls the functions of the runtime that torch has loaded, by address.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

import collectives._native as _native

Stream = int
"""A ``cudaStream_t``; 0 is the legacy default stream."""
Event = _native.CudaEvent

_WORD = 4
_PAGE = 1024
"""Words of pinned memory that are taken from torch at once."""
_NUMBERS = 4096

_PATIENCE = 1.0
"""After so many seconds a thread in NCCL is not issuing, which takes microseconds, but making connections."""

_LIBRARIES = ("libcudart.so", "libc10_cuda.so")
"""Names that the runtime's file, or else one of torch's that needs it, begins with."""


def addresses_in(path: str) -> list[int]:
    """Returns the addresses of the runtime's functions in a loaded library, or in those that it needs.

    Args:
        path: its file.

    Raises:
        OSError: it cannot be opened.
        AttributeError: it lacks a function.
    """
    library = ctypes.CDLL(path)
    return [
        ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        for name in _native.CudaStreams.functions()
    ]


@functools.cache
def runtime_functions() -> Sequence[int]:
    """Returns the addresses of the functions of the runtime that is mapped into this process.

    Raises:
        RuntimeError: it is not found, or lacks functions.
    """
    why = f"none of {', '.join(_LIBRARIES)} is loaded"
    files = []
    with suppress(OSError):
        files = [path for path, _ in mapped_files()]
    for path in (path for name in _LIBRARIES for path in files if Path(path).name.startswith(name)):
        try:
            return addresses_in(path)
        except (OSError, AttributeError) as error:  # noqa: PERF203 - the first path mostly has all
            why = str(error)
    raise RuntimeError(f"the CUDA runtime that torch uses cannot be called: {why}")


def mapped_files() -> list[tuple[str, tuple[str, str]]]:
    """Returns the files that are mapped into this process, as they were opened, with device and inode."""
    found: dict[tuple[str, tuple[str, str]], None] = {}
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6:
            found[parts[5], (parts[3], parts[4])] = None
    return list(found)


class Issuing(_native.NcclTurns):
    """Lets one thread at a time issue operations on the communicators of a device, as NCCL asks.

    A call that makes connections stays in NCCL until the other ranks have made it, too. There another thread
    may be in the same position, which came first: all would wait for ever. So a thread goes past those that
    have been in NCCL for a second, if they use other communicators.

    ``begin`` waits for a turn as :meth:`turn` does, and returns its number, for ``end``, which must follow.
    """

    def __init__(self) -> None:
        super().__init__(_PATIENCE)

    @contextmanager
    def turn(self, *communicators: object) -> Iterator[None]:
        """Waits for this thread's turn, which lasts as long as the ``with`` block.

        A thread may take another one within: what it issues may run code of the user's.

        Args:
            communicators: those that it calls, which are told apart by identity.
        """
        turn = self.begin(list(communicators))
        try:
            yield
        finally:
            self.end(turn)


def why_no_cuda() -> str | None:
    """Returns why there is no CUDA device here, ``None`` where there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with it, see pytorch.org"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; look at the driver (nvidia-smi) and at CUDA_VISIBLE_DEVICES"
    try:
        runtime_functions()
    except RuntimeError as error:
        return str(error)
    return None


class CudaDevice:
    """A CUDA device, as far as a group needs to know it.

    Methods may be called from any thread, and do not block unless they say so. The core calls the runtime for
    those that each operation needs.

    Args:
        device: ``cuda`` with an index.

    Raises:
        ValueError: there is none of that number.

    Attributes:
        device: the device.
        issuing: turns of the threads that issue operations of NCCL.
        is_current: returns whether it is the calling thread's current device.
        current_stream: returns the calling thread's stream on the device.
        is_capturing: returns whether a stream is being captured into a CUDA graph; as all that follow, and
            events, used with the device active: CUDA would open a context on another one.
        record: returns an event at the present end of a stream.
        order: lets what is issued to a stream from now on begin when another one has passed what it now
            holds.
        copy: lets a stream copy memory, by addresses: to, from, bytes, stream.
        drop: empties a list of tensors of the calling thread's stream, which may still use them. The caching
            allocator gives memory out again in the order of that.
    """

    kind: ClassVar[str] = "cuda"
    _shared: ClassVar[dict[tuple[type[CudaDevice], torch.device], CudaDevice]] = {}

    _raw_stream: Callable[[int], Stream] = staticmethod(
        getattr(torch._C, "_cuda_getCurrentRawStream", operator.index)
    )
    """As ``torch.cuda.current_stream().cuda_stream``, without a stream's object; no matter without CUDA."""

    drop: Callable[[list[torch.Tensor]], None] = staticmethod(list.clear)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.issuing = Issuing()
        index = self._open()
        self._streams = streams = _native.CudaStreams(self._functions(), index)
        self.is_current = streams.is_current
        self.is_capturing = streams.is_capturing
        self.record = streams.record
        self.order = streams.order
        self.copy = streams.copy
        self.current_stream = partial(self._raw_stream, index)
        self._idle: list[tuple[bool, Stream, Event]] = []
        self._taking = threading.Lock()
        self._table: torch.Tensor | None = None
        self._pages: list[torch.Tensor] = []
        self._words_taken = 0

    def _open(self) -> int:
        """Makes the device's context; returns the number by which the runtime knows the device."""
        index = self.device.index
        if not 0 <= index < (count := torch.cuda.device_count()):
            raise ValueError(
                f"there is no {self.device}: this process sees {count} GPUs, numbered from 0; look at "
                "CUDA_VISIBLE_DEVICES"
            )
        torch.zeros(1, device=self.device)  # NCCL takes the context as it finds it, so there must be one
        return index

    @staticmethod
    def _functions() -> Sequence[int]:
        """Returns the addresses of the runtime's functions."""
        return runtime_functions()

    @classmethod
    def shared(cls, device: torch.device) -> CudaDevice:
        """Returns the object of a device, the same for all groups of the process."""
        key = cls, device
        if key not in cls._shared:
            cls._shared.setdefault(key, cls(device))
        return cls._shared[key]

    @classmethod
    def of_rank(cls, rank: int) -> torch.device:
        """Returns the CUDA device with the rank's number, counted from the first again after the last.

        It is that of a global rank, where the ranks of a machine have its devices in order.
        """
        return torch.device("cuda", rank % torch.cuda.device_count())

    @staticmethod
    def reduces_float8() -> bool:
        """Returns whether NCCL can compute with 8-bit floats on the calling thread's device.

        It can on those of compute capability 9.0 or more.
        """
        return torch.cuda.get_device_capability() >= (9, 0)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Makes this the calling thread's device for the length of a ``with`` block.

        The device before is the current one again afterwards, unless that has no context, which this does not
        make.
        """
        if self.is_current():
            yield
        else:
            with torch.cuda.device(self.device):
                yield

    # ---- streams and events ------------------------------------------------------------------------------

    def capturing(self) -> bool:
        """Returns whether the calling thread's stream is being captured into a CUDA graph."""
        with self.activate():
            return self.is_capturing(self.current_stream())

    def take_stream(self, high_priority: bool) -> Stream:
        """Returns an idle stream that nobody else uses until :meth:`give_back`; not one of torch's pool.

        That has 32 streams, which users get in turn: what waits on one of theirs would hold operations back.

        Args:
            high_priority: whether the device is to prefer it.

        Raises:
            RuntimeError: the device has met an error.
        """
        with self._taking, self.activate():
            for place, (priority, stream, end) in enumerate(self._idle):
                if priority == high_priority and end.done():
                    del self._idle[place]
                    return stream
            return self._make_stream(high_priority)

    def give_back(self, stream: Stream, high_priority: bool) -> None:
        """Lets others take a stream, as soon as it has passed what it now holds.

        Args:
            stream: the stream.
            high_priority: what it was taken with.
        """
        with self._taking, self.activate():
            self._idle.append((high_priority, stream, self.record(stream)))

    def _make_stream(self, high_priority: bool) -> Stream:
        """Returns a new stream, with the device active; it is never destroyed."""
        return self._streams.make_stream(-1 if high_priority else 0)

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes a stream the calling thread's current one, and its device the current device."""
        return torch.cuda.stream(self._of_torch(stream))

    def run(self, stream: Stream, function: Callable[[], object]) -> None:
        """Carries out tensor operations in the order of a stream, without tracking gradients."""
        with self.using(stream), torch.no_grad():
            function()

    def _of_torch(self, stream: Stream) -> Any:
        return torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]

    def passed(self, event: Event) -> bool:
        """Returns whether a stream has got to the event.

        Raises:
            RuntimeError: the device has met an error.
        """
        with self.activate():
            return event.done()

    def block(self, event: Event) -> None:
        """Blocks until a stream has got to the event, with the GIL released.

        Raises:
            RuntimeError: the device has met an error.
        """
        with self.activate():
            event.synchronize()

    # ---- memory ------------------------------------------------------------------------------------------

    def empty(self, stream: Stream, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a flat tensor, whose memory is given out again only behind the work of a stream."""
        with self.using(stream):
            return torch.empty(count, dtype=dtype, device=self.device)

    def share(self, stream: Stream, tensor: torch.Tensor) -> None:
        """Lets a tensor that belongs to another stream live until this one has passed what it now holds."""
        tensor.record_stream(self._of_torch(stream))

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Lets the current stream copy a tensor; returns what it copies to, and the event that it has.

        That is pinned memory, which the device writes to without the host.
        """
        values = self.pinned(tensor.shape, tensor.dtype)
        values.copy_(tensor.detach(), non_blocking=True)
        with self.activate():
            return values, self.record(self.current_stream())

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor in memory of the host that the device reaches."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def take_words(self) -> int:
        """Returns the address of two words of 32 bits of the host, both zero, that the device reaches.

        They are never given back: a graph may write to them for as long as it lives.
        """
        with self._taking:
            if self._words_taken == len(self._pages) * _PAGE:
                self._pages.append(self.pinned([_PAGE], torch.int32).zero_())
            place = self._words_taken % _PAGE
            self._words_taken += 2
            return self._pages[-1].data_ptr() + place * _WORD

    def numbers(self) -> tuple[int, range]:
        """Returns the address, on the device, of two words that are zero, and those of 0, 1, 2 and so on."""
        with self._taking:
            if self._table is None:
                self._table = torch.tensor([0, *range(_NUMBERS)], dtype=torch.int32).to(self.device)
        zeros = self._table.data_ptr()
        return zeros, range(zeros + _WORD, zeros + (_NUMBERS + 1) * _WORD, _WORD)

    def future(self) -> torch.futures.Future[Any]:
        """Returns a future whose users' streams wait for the one that it was completed on."""
        return torch.futures.Future(devices=[self.device])


class UsedDevices(dict[torch.device, CudaDevice]):
    """The devices that a group has used, in order; what is asked for is used.

    Attributes:
        bound: the only one, of a group that is bound to a device.

    Args:
        kind: kind of the devices.
        where: rank and group, to stand in front of a message.
    """

    def __init__(self, kind: type[CudaDevice], where: str) -> None:
        super().__init__()
        self._kind = kind
        self._where = where
        self.bound: CudaDevice | None = None

    def __missing__(self, device: torch.device) -> CudaDevice:
        found = self._kind.shared(device)
        if self.bound is not None and found is not self.bound:
            raise ValueError(
                f"{self._where} an operation on {device}, but the group is bound to {self.bound.device} by "
                "its device_id; move the tensors there, or make the group without device_id"
            )
        return self.setdefault(device, found)

    def for_barrier(self, named: torch.device | int | None, rank: int) -> CudaDevice:
        """Returns the device that the user names, the one bound to, the first one used, or that of the rank.

        Args:
            named: what the user names: a device, or its number.
            rank: this process's rank in the world.
        """
        if isinstance(named, int):
            return self[torch.device(self._kind.kind, named)]
        if named is not None and named.index is not None:
            return self[named]
        for device in self.values():
            return device
        return self[self._kind.of_rank(rank)]
