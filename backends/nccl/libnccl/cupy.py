"""CuPy (``cupy.cuda.nccl``) as the package that finds and loads NCCL."""

from __future__ import annotations

import importlib
import warnings

from collectives.backends.nccl.libnccl.libnccl_file import ProviderError, install_command, the_loaded_file

__all__ = ["load"]

_OLDEST = 14


def load() -> str:
    """Imports CuPy, which loads NCCL; returns the file of that.

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
    return file.path
