"""pynccl (``pynccl.binding.libnccl``) as the package that finds and loads NCCL.

Nothing is called by its functions: those of pynccl 0.1.2 pass counts as 32-bit integers, know no error beyond
status 5, and lack settings, splits and own reductions.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from collectives.backends.nccl.libnccl.libnccl_file import (
    ProviderError,
    find_folder,
    install_command,
    the_loaded_file,
)

__all__ = ["load"]

_VARIABLE: Final = "NUMBA_NCCLLIB"


def load() -> str:
    """Imports pynccl and lets it load NCCL; returns the file of that.

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
    return file.path


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
