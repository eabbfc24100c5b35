"""NCCL by way of CuPy (``cupy.cuda.nccl``).

CuPy finds and loads the library, and makes and ends communicators. Operations, and what CuPy does not bind,
are called in the library that it loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import collectives._native as _native
from collectives.backends.nccl.libnccl.codes import NcclError, NcclStatus
from collectives.backends.nccl.libnccl.config import NcclConfig
from collectives.backends.nccl.libnccl.interface import Communicator, NcclLibrary
from collectives.backends.nccl.libnccl.libnccl_file import ProviderError, install_command, the_loaded_file
from collectives.backends.nccl.libnccl.symbols import Symbols

__all__ = ["CupyLibrary", "load"]

_OLDEST = 14


def load() -> CupyLibrary:
    """Imports CuPy and returns NCCL as it sees it.

    Raises:
        ProviderError: CuPy or its NCCL is not installed, too old, or a second NCCL is loaded.
    """
    install = install_command("cupy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where it finds no NCCL, which is said below
        try:
            cupy = importlib.import_module("cupy")
            nccl = importlib.import_module("cupy.cuda.nccl")
        except ModuleNotFoundError as error:
            if error.name != "cupy":
                raise ProviderError(f"CuPy cannot be imported: {error}") from error
            raise ProviderError(f"CuPy is not installed; install it with: {install}") from None
        except Exception as error:  # whatever a broken installation raises
            raise ProviderError(f"CuPy cannot be imported: {type(error).__name__}: {error}") from error
    if not nccl.available:
        raise ProviderError(f"CuPy {cupy.__version__} finds no libnccl.so.2; install one with: {install}")
    if int(cupy.__version__.split(".")[0]) < _OLDEST:
        raise ProviderError(
            f"CuPy {cupy.__version__} is too old, {_OLDEST} is needed; install it with: {install}"
        )
    file = the_loaded_file()
    if file is None:
        raise ProviderError("CuPy has its NCCL built in, so that it cannot be found; use CuPy's wheels")
    symbols = Symbols(file.path, nccl.get_version())
    symbols.check_complete()
    return CupyLibrary(nccl, symbols)


class CupyLibrary(NcclLibrary):
    """NCCL as CuPy sees it. CuPy passes on one setting, ``split_share``. Made by :func:`load`."""

    name: ClassVar[str] = "cupy"

    def __init__(self, nccl: Any, symbols: Symbols) -> None:
        super().__init__(symbols)
        self._nccl = nccl

    def _unique_id(self) -> bytes:
        with self._errors("ncclGetUniqueId"):
            return bytes(self._nccl.get_unique_id())

    def _check_config(self, config: NcclConfig) -> None:
        _cupy_config(self._nccl, config)

    def _init(self, unique_id: bytes, size: int, rank: int, config: NcclConfig) -> Communicator:
        settings = _cupy_config(self._nccl, config)
        with self._errors("ncclCommInitRankConfig"):
            made = self._nccl.NcclCommunicator(size, unique_id, rank, settings)
        return _CupyCommunicator(self._nccl, self._symbols, self._groups, made, rank, size)

    def _errors(self, function: str) -> AbstractContextManager[None]:
        return _errors_of(self._nccl, self._symbols, function)


@contextmanager
def _errors_of(nccl: Any, symbols: Symbols, function: str) -> Iterator[None]:
    """Turns CuPy's errors into ours. Of a status that it does not know, it says so by a KeyError."""
    try:
        yield
    except nccl.NcclError as error:
        raise symbols.error(error.status, function) from None
    except KeyError as error:
        raise symbols.error(int(error.args[0]), function) from None


def _cupy_config(nccl: Any, config: NcclConfig) -> Any:
    """Returns the settings as CuPy takes them.

    Raises:
        ValueError: there is one that it does not take.
    """
    given = config.given()
    refused = sorted(set(given) - {"split_share"})
    if refused:
        raise ValueError(
            f"CuPy passes only split_share on to NCCL, but {', '.join(refused)} is set; leave it out, or "
            "take the provider pynccl (COLLECTIVES_NCCL_PROVIDER=pynccl)"
        )
    return nccl.NcclConfig(split_share=int(given["split_share"])) if given else None


class _CupyCommunicator(Communicator):
    def __init__(
        self, nccl: Any, symbols: Symbols, groups: _native.NcclGroups, inner: Any, rank: int, size: int
    ) -> None:
        super().__init__(symbols, groups, int(inner.comm), rank, size)
        self._nccl = nccl
        self._inner = inner
        # CuPy's object destroys its communicator when it goes, which can hang where the other ranks do not. A
        # reference that nobody holds keeps it, at the interpreter's end too, until it is ended on purpose.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))

    @property
    def handle(self) -> int:
        return int(self._inner.comm)

    def _split(self, color: int, key: int, config: NcclConfig | None) -> Communicator | None:
        settings = None if config is None else _cupy_config(self._nccl, config)
        with _errors_of(self._nccl, self._symbols, "ncclCommSplit"):
            made = self._inner.commSplit(color, key, settings)
        if made is None:
            return None
        return _CupyCommunicator(self._nccl, self._symbols, self._groups, made, made.rank_id(), made.size())

    def _async_error(self) -> NcclError | None:
        try:
            with _errors_of(self._nccl, self._symbols, "ncclCommGetAsyncError"):
                self._inner.check_async_error()
        except NcclError as error:
            return None if error.status == NcclStatus.IN_PROGRESS else error
        return None

    def _abort(self) -> None:
        self._inner.abort()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._inner))

    def _destroy(self) -> None:
        self._inner.destroy()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._inner))
