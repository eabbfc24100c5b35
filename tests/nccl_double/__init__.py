"""A double of NCCL for tests: NCCL's C interface on host memory, and threads that stand for CUDA streams.

`build` compiles it; loaded before CuPy and pynccl, both take it for NCCL::

    double = NcclDouble(path)      # before the provider is loaded
    stream = double.stream()
    communicator.all_reduce(data, data, count, dtype, op, stream)
    double.synchronize(stream)

It is test equipment and no part of the package. What it does and does not share with NCCL stands at the top
of native/nccl.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LastCall", "NcclDouble", "build"]

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")


def build(folder: Path) -> Path:
    """Compiles the double into a folder for what it is made of, unless it is there; returns the library."""
    compiler = os.environ.get("CXX", "c++")
    sources = sorted(str(source) for source in _SOURCES.glob("*.cpp"))
    digest = hashlib.sha256(" ".join([compiler, *_FLAGS]).encode())
    for source in sorted(_SOURCES.glob("*.[ch]pp")):
        digest.update(source.read_bytes())
    path = folder / digest.hexdigest()[:16] / "libnccl.so.2"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    command = [compiler, *_FLAGS, f"-Wl,-soname,{path.name}", "-o", str(new), *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    with contextlib.suppress(FileExistsError):  # where another process was first: ranks have its file open
        path.hardlink_to(new)
    new.unlink()
    return path


class _LastCall(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char * 32),
        ("count", ctypes.c_uint64),
        ("type", ctypes.c_int),
        ("op", ctypes.c_int),
        ("root", ctypes.c_int),
        ("stream", ctypes.c_ssize_t),
        ("communicator", ctypes.c_ssize_t),
    )


@dataclass(frozen=True)
class LastCall:
    """The operation that was called last, as it came to NCCL.

    ``root`` is also the peer of a message; ``communicator`` is its handle.
    """

    function: str
    count: int
    type: int
    op: int
    root: int
    stream: int
    communicator: int


class NcclDouble:
    """The double, loaded into this process, where it stands for NCCL from now on.

    Streams and events are numbers. Stream 0 has no thread: what is put on it is done when the call returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name in ("stream_create", "event_create"):
            getattr(self._library, f"double_{name}").restype = ctypes.c_ssize_t
        self._library.double_config.restype = ctypes.c_char_p
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._called: list[Any] = []

    def _do(self, name: str, *arguments: Any) -> int:
        wrapped = [ctypes.c_ssize_t(value) if isinstance(value, int) else value for value in arguments]
        result = int(getattr(self._library, f"double_{name}")(*wrapped))
        assert result >= 0, f"double_{name}{arguments}: there is no such stream or event"
        return result

    def stream(self) -> int:
        """Makes a stream: a thread that carries out what is put on it, in order."""
        return int(self._library.double_stream_create())

    def destroy_stream(self, stream: int) -> None:
        """Ends a stream after what it has to do; does not wait for that."""
        self._do("stream_destroy", stream)

    def synchronize(self, stream: int) -> None:
        """Waits until the stream has done what it has to do, with the GIL released."""
        self._do("stream_synchronize", stream)

    def sleep(self, stream: int, milliseconds: int) -> None:
        """Lets the stream sleep."""
        self._do("stream_sleep", stream, milliseconds)

    def copy(self, stream: int, to: int, source: int, size_bytes: int) -> None:
        """Lets the stream copy memory."""
        self._do("stream_copy", stream, ctypes.c_void_p(to), ctypes.c_void_p(source), size_bytes)

    def call(self, stream: int, function: Callable[[], None]) -> None:
        """Lets the stream call a function, which must not raise."""
        callback = self._callback(lambda _: function())
        self._called.append(callback)
        nothing = ctypes.c_void_p(None)
        self._do("stream_call", stream, callback, nothing, b"a function of the host", nothing, 0)

    def event(self) -> int:
        """Makes an event."""
        return int(self._library.double_event_create())

    def destroy_event(self, event: int) -> None:
        """Forgets an event; what waits for it goes on waiting."""
        self._do("event_destroy", event)

    def record(self, event: int, stream: int) -> None:
        """Lets the event stand for the place that the stream has reached, instead of the one before."""
        self._do("event_record", event, stream)

    def wait(self, event: int, stream: int) -> None:
        """Lets the stream wait for the event; stream 0 waits here."""
        self._do("event_wait", event, stream)

    def query(self, event: int) -> bool:
        """Returns whether the stream has passed the place of the event."""
        return bool(self._do("event_query", event))

    def synchronize_event(self, event: int) -> None:
        """Waits for the event, with the GIL released."""
        self._do("event_synchronize", event)

    def fail_next(self, function: str, status: int, text: str = "") -> None:
        """Lets the next call of a function of NCCL fail, such as ``"ncclAllReduce"``."""
        self._library.double_fail_next(function.encode(), status, text.encode())

    def delay_next(self, function: str, milliseconds: int) -> None:
        """Holds the next call of a function of NCCL up, inside it; what it returns is as without that."""
        self._library.double_delay_next(function.encode(), milliseconds)

    def delayed(self) -> int:
        """Returns how many calls are held up."""
        return int(self._library.double_delayed())

    def set_async_error(self, handle: int, status: int, text: str = "") -> None:
        """Gives the communicator of a handle an asynchronous error; what runs goes on running."""
        self._do("set_async_error", ctypes.c_void_p(handle), status, text.encode())

    def dry_run(self, on: bool) -> None:
        """Lets operations be checked and noted, but not carried out, or carries them out again."""
        self._library.double_dry_run(int(on))

    def last_call(self) -> LastCall:
        """Returns the operation that was called last."""
        last = _LastCall()
        self._library.double_last_call(ctypes.byref(last))
        values = {name: getattr(last, name) for name, *_ in last._fields_}
        return LastCall(**values | {"function": last.function.decode()})

    def set_version(self, version: int) -> None:
        """Sets the version that NCCL tells, also other ranks."""
        self._library.double_set_version(version)

    def set_gpu(self, bus: int) -> None:
        """Lets this process say that it uses the GPU of a bus number, which others may say, too.

        Each rank has a GPU of its own otherwise, or with 0.
        """
        self._library.double_set_gpu(ctypes.c_long(bus))

    def hold_in_graph(self, handle: int, on: bool) -> None:
        """Lets a graph hold operations of a communicator, which cannot end then, or lets the graph go."""
        self._library.double_hold_in_graph(ctypes.c_void_p(handle), int(on))

    def contexts(self) -> set[int]:
        """Returns the devices on which a call made a context: the current ones of the threads that called."""
        found = int(self._library.double_contexts())
        return {device for device in range(32) if found >> device & 1}

    def misuses(self) -> int:
        """Returns how many calls used a communicator after its end."""
        return int(self._library.double_misuses())

    def launches(self) -> int:
        """Returns how often operations were launched; those of a group of calls are launched once."""
        return int(self._library.double_launches())

    def holds(self) -> int:
        """Returns how often a stream was held before a task, as a seed had it."""
        return int(self._library.double_holds())

    def connecting(self) -> int:
        """Returns how many threads are in calls that make connections, and wait for other ranks."""
        return int(self._library.double_connecting())

    def communicators(self) -> int:
        """Returns how many communicators have not been ended."""
        return int(self._library.double_communicators())

    def config(self, handle: int) -> dict[str, Any]:
        """Returns the settings that a communicator was made with, by NCCL's names, but those left open."""
        text = self._library.double_config(ctypes.c_void_p(handle)).decode(errors="replace")
        pairs = (line.split("=", 1) for line in text.splitlines())
        return {name: value if name.endswith("Name") else int(value) for name, value in pairs}
