"""The providers of NCCL, CuPy and pynccl: packages that find and load it.

NCCL itself is called in the same way under both, by its C functions. Communicators, errors and group state
belong to a copy of the library, of which a process may have only one: torch, CuPy and pynccl each look for
one in their own way, and two copies would know nothing of each other. Nothing is called by pynccl's
functions: those of 0.1.2 pass counts as 32-bit integers, know no error beyond status 5, and lack settings,
splits and own reductions.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from collectives.backends.nccl.device import mapped_files
from collectives.backends.nccl.libnccl import NcclLibrary, ProviderError, version_text
from collectives.errors import DistBackendError

PROVIDERS: Final = ("cupy", "pynccl")
"""The providers, in the order in which they are tried."""

PROVIDER_VARIABLE: Final = "COLLECTIVES_NCCL_PROVIDER"
"""Environment variable that names the provider where the program does not."""

_OLDEST_CUPY = 14
_FOLDER_VARIABLE: Final = "NUMBA_NCCLLIB"
_LIBRARY_NAME = re.compile(r"libnccl\.so(\.\d+)*$")

_lock = threading.Lock()
_loaded: dict[str, NcclLibrary] = {}


def load(provider: str | None = None) -> NcclLibrary:
    """Returns NCCL by way of a provider, the same object each time.

    Args:
        provider: ``"cupy"`` or ``"pynccl"``. ``None`` takes the one that COLLECTIVES_NCCL_PROVIDER names, or
            else the first that can be used.

    Raises:
        ValueError: there is no provider of that name.
        DistBackendError: the provider cannot be used, or none can; with the reasons and what to install.
    """
    source = PROVIDER_VARIABLE if provider is None else "the provider"
    given = os.environ.get(PROVIDER_VARIABLE) or None if provider is None else provider
    names = PROVIDERS if given is None else (given.lower(),)
    if names[0] not in PROVIDERS:
        raise ValueError(f"{source} must be one of {', '.join(PROVIDERS)}, but is {given!r}")
    reasons = {}
    with _lock:
        for name in names:
            try:
                if name not in _loaded:
                    _loaded[name] = NcclLibrary(name, _load_cupy() if name == "cupy" else _load_pynccl())
                return _loaded[name]
            except ProviderError as error:  # noqa: PERF203 - two providers
                reasons[name] = str(error)
    if given is not None:
        raise DistBackendError(f"NCCL cannot be used by way of {names[0]}: {reasons[names[0]]}")
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise DistBackendError(f"no provider of NCCL can be used: {listed}")


def unavailable(provider: str | None = None) -> str | None:
    """Returns why NCCL cannot be used by way of a provider, ``None`` where it can.

    Arguments as :func:`load`, which it carries out: what can be used is loaded afterwards.
    """
    try:
        load(provider)
    except (ValueError, DistBackendError) as error:
        return str(error)
    return None


def describe(provider: str | None = None) -> str:
    """Returns the version of NCCL and its provider in words, such as ``"NCCL 2.28.9 by way of cupy 14.2.0"``.

    Arguments and errors as :func:`load`.
    """
    library, installed = load(provider), "of unknown version"
    names = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x"), "pynccl": ("pynccl",)}[library.name]
    for name in reversed(names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.version(name)
    return f"NCCL {version_text(library.version())} by way of {library.name} {installed}"


# ---- copies of NCCL --------------------------------------------------------------------------------------


def loaded_files() -> list[str]:
    """Returns the different copies of NCCL that are mapped into this process, by their files."""
    found: dict[tuple[str, str], str] = {}
    for path, identity in mapped_files():
        if _LIBRARY_NAME.search(path.removesuffix(" (deleted)")):
            found.setdefault(identity, path)
    return list(found.values())


def _loaded_path() -> str | None:
    """Returns the file of the copy that is mapped into this process, ``None`` before there is one.

    Raises:
        ProviderError: there are several.
    """
    found = loaded_files()
    if len(found) > 1:
        raise ProviderError(
            f"{len(found)} different copies of NCCL are loaded in this process: "
            f"{', '.join(found)}; let LD_LIBRARY_PATH, NUMBA_NCCLLIB and the installed "
            "packages lead to the same one (that of torch comes first where torch is built for CUDA)"
        )
    return found[0] if found else None


def _find_folder() -> Path | None:
    """Returns the folder of the copy that is loaded, else of NVIDIA's wheel, else of the system's.

    To find the system's, it loads that. ``None`` where there is none.
    """
    path = _loaded_path()
    if path is None:
        if (wheel := _wheel_folder()) is not None:
            return wheel
        try:
            ctypes.CDLL("libnccl.so.2")
        except OSError:
            return None
        path = _loaded_path()
    return Path(path).parent if path is not None else None


def _wheel_folder() -> Path | None:
    """Returns the folder with the library of NVIDIA's wheel nvidia-nccl-cu12 or -cu13, if there is one."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of NVIDIA's at all
        return None
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if list(Path(place, "lib").glob("libnccl.so.*")):
            return Path(place, "lib")
    return None


# ---- providers -------------------------------------------------------------------------------------------


def _install_command(provider: str) -> str:
    """Returns the command that installs what a provider needs, for the CUDA that torch is built for."""
    cuda = torch.version.cuda
    extra = "cuda12" if cuda is not None and cuda.startswith("12.") else "cuda13"
    return f"pip install 'torch-collectives[{extra if provider == 'cupy' else f'{extra},pynccl'}]'"


def _import(package: str, module: str, shown: str) -> ModuleType:
    """Returns a module of a provider's package.

    Raises:
        ProviderError: it cannot be imported.
    """
    with warnings.catch_warnings():
        # CuPy warns where it finds no NCCL, and pynccl imports a module that numba-cuda calls deprecated.
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(package)
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise ProviderError(f"{shown} cannot be imported: {error}") from error
            command = _install_command(package)
            raise ProviderError(f"{shown} is not installed; install it with: {command}") from None
        except (
            Exception
        ) as error:  # whatever a broken installation raises, as numba and numba-cuda that do not fit
            raise ProviderError(f"{shown} cannot be imported: {type(error).__name__}: {error}") from error


def _load_cupy() -> str:
    """Imports CuPy, which loads NCCL; returns the file of that.

    Raises:
        ProviderError: CuPy or its NCCL is not installed, too old, or a second NCCL is loaded.
    """
    nccl, install = _import("cupy", "cupy.cuda.nccl", "CuPy"), _install_command("cupy")
    version = importlib.import_module("cupy").__version__
    if not nccl.available:
        raise ProviderError(f"CuPy {version} finds no libnccl.so.2; install one with: {install}")
    if int(version.split(".")[0]) < _OLDEST_CUPY:
        raise ProviderError(
            f"CuPy {version} is too old, {_OLDEST_CUPY} is needed; install it with: {install}"
        )
    path = _loaded_path()
    if path is None:
        raise ProviderError("CuPy has its NCCL built in, so that it cannot be found; use CuPy's wheels")
    return path


def _load_pynccl() -> str:
    """Imports pynccl and lets it load NCCL; returns the file of that.

    pynccl opens the library in the folder that the environment variable NUMBA_NCCLLIB names. Where that is
    not set, it is led to the copy that this process has, or else to that of NVIDIA's wheel, or to the
    system's.

    Raises:
        ProviderError: pynccl or NCCL is not installed, or a second NCCL would be loaded.
    """
    binding = _import("pynccl", "pynccl.binding", "pynccl")
    before = _loaded_path()
    with _led_to(None if os.environ.get(_FOLDER_VARIABLE) else _find_folder()):
        chosen = importlib.import_module("pynccl.utils.libutils").get_nccllib("nccl")
        if before is not None and chosen is not None and not Path(before).samefile(chosen):
            raise ProviderError(
                f"pynccl would open {chosen}, but this process has loaded {before}; two copies of NCCL "
                f"cannot live in one process: unset {_FOLDER_VARIABLE} or let it be {Path(before).parent}"
            )
        try:
            api = binding.libnccl()
        except Exception as error:  # a bare one where there is no library, AttributeError where it is too old
            raise ProviderError(
                f"pynccl finds no usable libnccl.so.2 ({' '.join(str(error).split())}); install one with: "
                f"{_install_command('pynccl')}, or let {_FOLDER_VARIABLE} name its folder"
            ) from error
    path = _loaded_path()
    if path is None:
        raise ProviderError(
            f"pynccl opened {api.dll._name}, which is no libnccl.so; look at {_FOLDER_VARIABLE}"
        )
    return path


@contextmanager
def _led_to(folder: Path | None) -> Iterator[None]:
    """Lets the variable name a folder for the length of a ``with`` block, where there is one."""
    before = os.environ.get(_FOLDER_VARIABLE)
    if folder is not None:
        os.environ[_FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if folder is not None:
            if before is None:
                del os.environ[_FOLDER_VARIABLE]
            else:
                os.environ[_FOLDER_VARIABLE] = before
