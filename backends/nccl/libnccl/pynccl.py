"""NCCL by way of pynccl: its low-level bindings (``pynccl.binding.libnccl``), corrected.

pynccl 0.1.2 passes counts as 32-bit integers, knows no error beyond status 5, and lacks settings, splits and
own reductions. It finds and loads the library, and its functions end communicators; their status is checked
here. Operations, and what it lacks, are called in the library that it loaded. Its higher levels
(``pynccl.Nccl``) need a context of numba and own streams, and are not used.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char, c_int
from pathlib import Path
from typing import Any, ClassVar, Final

import collectives._native as _native
from collectives.backends.nccl.libnccl.codes import UNIQUE_ID_BYTES, NcclError, NcclStatus
from collectives.backends.nccl.libnccl.config import NcclConfig
from collectives.backends.nccl.libnccl.interface import Communicator, NcclLibrary
from collectives.backends.nccl.libnccl.libnccl_file import (
    ProviderError,
    find_folder,
    install_command,
    the_loaded_file,
)
from collectives.backends.nccl.libnccl.symbols import Symbols

__all__ = ["PyncclLibrary", "load"]

_VARIABLE: Final = "NUMBA_NCCLLIB"


def load() -> PyncclLibrary:
    """Imports pynccl and returns NCCL as it sees it.

    pynccl opens the library in the folder that the environment variable NUMBA_NCCLLIB names. Where that is
    not set, it is led to the copy that this process has, or else to that of NVIDIA's wheel, or to the
    system's.

    Raises:
        ProviderError: pynccl or NCCL is not installed, or a second NCCL would be loaded.
    """
    binding = _import_binding()
    before = the_loaded_file()
    with _led_to(None if os.environ.get(_VARIABLE) else find_folder()):
        _refuse_another(before.path if before is not None else None)
        try:
            api = binding.libnccl()
        except Exception as error:  # a bare one where there is no library, AttributeError where it is too old
            raise ProviderError(
                f"pynccl finds no usable libnccl.so.2 ({' '.join(str(error).split())}); install one with: "
                f"{install_command('pynccl')}, or let {_VARIABLE} name its folder"
            ) from error
    file = the_loaded_file()
    if file is None:
        raise ProviderError(f"pynccl opened {api.dll._name}, which is no libnccl.so; look at {_VARIABLE}")
    version = c_int()
    api.dll.ncclGetVersion(byref(version))
    symbols = Symbols(file.path, version.value)
    symbols.check_complete()
    return PyncclLibrary(binding, api, symbols)


def _import_binding() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports a module that numba-cuda calls deprecated
        try:
            importlib.import_module("pynccl")
            return importlib.import_module("pynccl.binding")
        except ModuleNotFoundError as error:
            if error.name == "pynccl":
                raise ProviderError(
                    f"pynccl is not installed; install it with: {install_command('pynccl')}"
                ) from None
            raise ProviderError(f"pynccl cannot be imported: {error}") from error
        except Exception as error:  # numba and numba-cuda that do not fit raise AttributeError and more
            raise ProviderError(f"pynccl cannot be imported: {type(error).__name__}: {error}") from error


@contextmanager
def _led_to(folder: Path | None) -> Iterator[None]:
    """Sets the variable for the length of a ``with`` block, where there is a folder."""
    before = os.environ.get(_VARIABLE)
    if folder is not None:
        os.environ[_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if folder is not None:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before


def _refuse_another(loaded: str | None) -> None:
    """Raises a ProviderError where pynccl would open another NCCL than the one that is loaded."""
    chosen = importlib.import_module("pynccl.utils.libutils").get_nccllib("nccl")
    if loaded is not None and chosen is not None and not Path(loaded).samefile(chosen):
        raise ProviderError(
            f"pynccl would open {chosen}, but this process has loaded {loaded}; two copies of NCCL cannot "
            f"live in one process: unset {_VARIABLE} or let it be {Path(loaded).parent}"
        )


class PyncclLibrary(NcclLibrary):
    """NCCL as pynccl sees it. All settings can be passed on. Made by :func:`load`."""

    name: ClassVar[str] = "pynccl"

    def __init__(self, binding: Any, api: Any, symbols: Symbols) -> None:
        super().__init__(symbols)
        self._binding = binding
        self._functions = api.dll

    def _unique_id(self) -> bytes:
        made = self._binding.ncclUniqueId()  # four times as long as NCCL's, which fills the beginning
        self._symbols.check(self._functions.ncclGetUniqueId(byref(made)), "ncclGetUniqueId")
        return bytes((c_char * UNIQUE_ID_BYTES).from_buffer(made).raw)

    def _check_config(self, config: NcclConfig) -> None:
        self._symbols.check_config(config)

    def _init(self, unique_id: bytes, size: int, rank: int, config: NcclConfig) -> Communicator:
        handle = self._symbols.init(unique_id, size, rank, config)
        return _PyncclCommunicator(self._functions, self._symbols, self._groups, handle, rank, size)


class _PyncclCommunicator(Communicator):
    def __init__(
        self, functions: Any, symbols: Symbols, groups: _native.NcclGroups, handle: int, rank: int, size: int
    ) -> None:
        super().__init__(symbols, groups, handle, rank, size)
        self._functions = functions
        self._handle = handle

    @property
    def handle(self) -> int:
        return self._handle

    def _split(self, color: int, key: int, config: NcclConfig | None) -> Communicator | None:
        handle = self._symbols.split(self._handle, color, key, config)
        if not handle:
            return None
        rank, size = c_int(), c_int()
        self._symbols.check(self._functions.ncclCommUserRank(handle, byref(rank)), "ncclCommUserRank")
        self._symbols.check(self._functions.ncclCommCount(handle, byref(size)), "ncclCommCount")
        return _PyncclCommunicator(
            self._functions, self._symbols, self._groups, handle, rank.value, size.value
        )

    def _async_error(self) -> NcclError | None:
        status = c_int()
        function = "ncclCommGetAsyncError"
        self._symbols.check(self._functions.ncclCommGetAsyncError(self._handle, byref(status)), function)
        if status.value in (NcclStatus.SUCCESS, NcclStatus.IN_PROGRESS):
            return None
        return self._symbols.error(status.value, function)

    def _abort(self) -> None:
        handle, self._handle = self._handle, 0
        self._symbols.check(self._functions.ncclCommAbort(handle), "ncclCommAbort")

    def _destroy(self) -> None:
        handle, self._handle = self._handle, 0
        self._symbols.check(self._functions.ncclCommDestroy(handle), "ncclCommDestroy")
