"""Calls of the CUDA runtime that torch has loaded, without the GIL."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["CudaRuntime", "loaded_runtime"]

_NOT_READY = 600
"""``cudaErrorNotReady``"""
_NON_BLOCKING = 1
"""``cudaStreamNonBlocking``: the stream does not wait for the legacy default one."""
_RELAXED_CAPTURE = 2
"""``cudaStreamCaptureModeRelaxed``"""


class CudaRuntime:
    """The runtime's library.

    torch asks for an event with the GIL held. That call may have to wait for a lock of the driver, which
    another thread holds while it allocates memory or loads kernels; all of Python would wait with it. And
    unless the asking thread has the relaxed capture mode, the question breaks off the captures of all
    threads.

    Args:
        path: its file.

    Raises:
        OSError: it cannot be opened.
        AttributeError: it lacks a function.
    """

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._query = library.cudaEventQuery
        self._query.argtypes = (ctypes.c_void_p,)
        self._make_stream = library.cudaStreamCreateWithPriority
        self._make_stream.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int)
        self._last_error = library.cudaGetLastError
        self._name = library.cudaGetErrorName
        self._name.argtypes, self._name.restype = (ctypes.c_int,), ctypes.c_char_p
        self._text = library.cudaGetErrorString
        self._text.argtypes, self._text.restype = (ctypes.c_int,), ctypes.c_char_p
        self._exchange_mode = library.cudaThreadExchangeStreamCaptureMode

    def event_done(self, event: int) -> bool:
        """Returns whether a ``cudaEvent_t`` is done.

        Raises:
            RuntimeError: the device has met an error.
        """
        with self._relaxed_capture():
            status = self._query(event)
        if status == _NOT_READY:
            self._last_error()  # else this thread's next call of torch would find the status there
            return False
        self._check(status)
        return True

    def make_stream(self, priority: int) -> int:
        """Returns a new ``cudaStream_t`` of the current device.

        Args:
            priority: lower numbers are preferred.

        Raises:
            RuntimeError: the device has met an error, or has no memory left.
        """
        made = ctypes.c_void_p()
        with self._relaxed_capture():
            self._check(self._make_stream(ctypes.byref(made), _NON_BLOCKING, priority))
        return made.value or 0

    @contextmanager
    def _relaxed_capture(self) -> Iterator[None]:
        """Lets this thread make calls that would break off captures of other threads."""
        mode = ctypes.c_int(_RELAXED_CAPTURE)
        self._exchange_mode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange_mode(ctypes.byref(mode))

    def _check(self, status: int) -> None:
        if status:
            self._last_error()
            name, text = self._name(status).decode(), self._text(status).decode()
            raise RuntimeError(f"CUDA error {status}: {text} ({name})")


@functools.cache
def loaded_runtime() -> CudaRuntime | None:
    """Returns the runtime that is mapped into this process, ``None`` where there is none to be found."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line[line.find("/") :] if "/" in line else ""
            if Path(path).name.startswith("libcudart.so"):
                with suppress(OSError, AttributeError):
                    return CudaRuntime(path)
    return None
