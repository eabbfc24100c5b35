"""The functions of the CUDA runtime that torch has loaded, for the core, which calls them by address."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import collectives._native as _native

__all__ = ["addresses_in", "runtime_functions"]

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
    for path in _mapped():
        try:
            return addresses_in(path)
        except (OSError, AttributeError) as error:  # noqa: PERF203 - the first path mostly has all
            why = str(error)
    raise RuntimeError(f"the CUDA runtime that torch uses cannot be called: {why}")


def _mapped() -> Iterator[str]:
    """Yields the files of this process that have the runtime, or need it, the most likely first."""
    files: dict[str, None] = {}
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/" in line:
                files[line[line.find("/") :]] = None
    for name in _LIBRARIES:
        yield from (path for path in files if Path(path).name.startswith(name))
