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

import ctypes
import fcntl
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")

_number = ctypes.c_ssize_t
_RESULTS = {
    "stream_create": _number,
    "event_create": _number,
    "capture_end": _number,
    "config": ctypes.c_char_p,
    "last_call": ctypes.c_char_p,
    "races": ctypes.c_char_p,
}
"""Results of the double's functions that are no ``int``."""

CUDA_ERRORS = {
    800: "this thread would wait for a stream",
    900: "not permitted when a stream is captured",
    901: "a forbidden call has broken the capture off",
    903: "the capture was begun on another stream",
    904: "a stream of the capture has work that its first stream did not join",
    905: "an event from outside would become part of the capture",
    907: "not permitted on an event that was recorded in a capture",
}

loaded_from: dict[Path, ctypes.CDLL] = {}
"""The double that this process has loaded, by its file."""


def build(folder: Path) -> Path:
    """Compiles the double into a folder for what it is made of, unless it is there; returns the library."""
    compiler = os.environ.get("CXX", "c++")
    sources = "".join(f'#include "{source}"\n' for source in sorted(_SOURCES.glob("*.cpp")))
    digest = hashlib.sha256(" ".join([compiler, *_FLAGS]).encode())
    for source in sorted(_SOURCES.glob("*.[ch]pp")):
        digest.update(source.read_bytes())
    path = folder / digest.hexdigest()[:16] / "libnccl.so.2"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that share the tests compile it once
        if not path.exists():
            new = path.with_suffix(".new")
            command = [compiler, *_FLAGS, f"-Wl,-soname,{path.name}", "-o", str(new), "-x", "c++", "-"]
            done = subprocess.run(command, input=sources, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
            new.rename(path)
    return path


def ask(name: str, *arguments: object) -> Any:
    """Returns what a function of the double returns: a number, or text."""
    (library,) = loaded_from.values()
    given = [_number(one) if isinstance(one, int) else one for one in arguments]
    result = getattr(library, f"double_{name}")(*given)
    return result.decode(errors="replace") if isinstance(result, bytes) else result


def do(name: str, *arguments: object) -> int:
    """Calls a function of the double.

    Raises:
        RuntimeError: the call is forbidden, as in a capture.
    """
    result = int(ask(name, *arguments))
    if -result in CUDA_ERRORS:
        raise RuntimeError(f"double_{name}{arguments}: {CUDA_ERRORS[-result]} ({-result})")
    assert result >= 0, f"double_{name}{arguments}: there is no such stream or event"
    return result


class LastCall(NamedTuple):
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
        if path not in loaded_from:
            library = loaded_from[path] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            for name, kind in _RESULTS.items():
                getattr(library, f"double_{name}").restype = kind

    def stream(self) -> int:
        """Makes a stream: a thread that carries out what is put on it, in order."""
        return do("stream_create")

    def synchronize(self, stream: int) -> None:
        """Waits until the stream has done what it has to do, with the GIL released."""
        do("stream_synchronize", stream)

    def sleep(self, stream: int, milliseconds: int) -> None:
        """Lets the stream sleep."""
        do("stream_sleep", stream, milliseconds)

    def event(self) -> int:
        """Makes an event."""
        return do("event_create")

    def record(self, event: int, stream: int) -> None:
        """Lets the event stand for the place that the stream has reached, instead of the one before."""
        do("event_record", event, stream)

    def query(self, event: int) -> bool:
        """Returns whether the stream has passed the place of the event."""
        return bool(do("event_query", event))

    def fail_next(self, function: str, status: int, text: str = "") -> None:
        """Lets the next call of a function of NCCL fail, such as ``"ncclAllReduce"``."""
        do("fail_next", function.encode(), status, text.encode())

    def delay_next(self, function: str, milliseconds: int) -> None:
        """Holds the next call of a function of NCCL up, inside it; what it returns is as without that."""
        do("delay_next", function.encode(), milliseconds)

    def delayed(self) -> int:
        """Returns how many calls are held up."""
        return do("delayed")

    def set_async_error(self, handle: int, status: int, text: str = "") -> None:
        """Gives the communicator of a handle an asynchronous error; what runs goes on running."""
        do("set_async_error", handle, status, text.encode())

    def dry_run(self, on: bool) -> None:
        """Lets operations be checked and noted, but not carried out, or carries them out again."""
        do("dry_run", on)

    def last_call(self) -> LastCall:
        """Returns the operation that was called last."""
        function, *numbers = ask("last_call").split()
        return LastCall(function, *map(int, numbers))

    def set_version(self, version: int) -> None:
        """Sets the version that NCCL tells, also other ranks."""
        do("set_version", version)

    def set_gpu(self, bus: int) -> None:
        """Lets this process say that it uses the GPU of a bus number, which others may say, too.

        Each rank has a GPU of its own otherwise, or with 0.
        """
        do("set_gpu", bus)

    def hold_in_graph(self, handle: int, on: bool) -> None:
        """Lets a graph hold operations of a communicator, which cannot end then, or lets the graph go."""
        do("hold_in_graph", handle, on)

    def contexts(self) -> set[int]:
        """Returns the devices on which a call made a context: the current ones of the threads that called."""
        found = do("contexts")
        return {device for device in range(32) if found >> device & 1}

    def misuses(self) -> int:
        """Returns how many calls used a communicator after its end."""
        return do("misuses")

    def launches(self) -> int:
        """Returns how often operations were launched; those of a group of calls are launched once."""
        return do("launches")

    def holds(self) -> int:
        """Returns how often a stream was held before a task, as a seed had it."""
        return do("holds")

    def connecting(self) -> int:
        """Returns how many threads are in calls that make connections, and wait for other ranks."""
        return do("connecting")

    def communicators(self) -> int:
        """Returns how many communicators have not been ended."""
        return do("communicators")

    def config(self, handle: int) -> dict[str, Any]:
        """Returns the settings that a communicator was made with, by NCCL's names, but those left open."""
        pairs = (line.split("=", 1) for line in ask("config", handle).splitlines())
        return {name: value if name.endswith("Name") else int(value) for name, value in pairs}
