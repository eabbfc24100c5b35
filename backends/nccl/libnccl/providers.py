"""Chooses the provider of NCCL, the package that finds and loads it: CuPy or pynccl.

NCCL itself is called in the same way under both, by its C functions.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import threading
from typing import Final

from collectives.backends.nccl.libnccl.codes import version_text
from collectives.backends.nccl.libnccl.interface import NcclLibrary
from collectives.backends.nccl.libnccl.libnccl_file import ProviderError
from collectives.backends.nccl.libnccl.symbols import Symbols
from collectives.errors import DistBackendError

__all__ = ["PROVIDERS", "PROVIDER_VARIABLE", "describe", "load", "unavailable"]

PROVIDERS: Final = ("cupy", "pynccl")
"""The providers, in the order in which they are tried."""

PROVIDER_VARIABLE: Final = "COLLECTIVES_NCCL_PROVIDER"
"""Environment variable that names the provider where the program does not."""

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
    names = _chosen(provider)
    reasons = []
    with _lock:
        for name in names:
            library, reason = _load(name)
            if library is not None:
                return library
            reasons.append(reason)
    raise DistBackendError(_text(names, reasons))


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
    library = load(provider)
    names = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x"), "pynccl": ("pynccl",)}[library.name]
    return f"NCCL {version_text(library.version())} by way of {library.name} {_version_of(names)}"


def _version_of(distributions: tuple[str, ...]) -> str:
    """Returns the version of the first distribution that is installed."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"


def _chosen(provider: str | None) -> tuple[str, ...]:
    source = "the provider" if provider is not None else PROVIDER_VARIABLE
    name = provider if provider is not None else os.environ.get(PROVIDER_VARIABLE, "")
    if provider is None and not name:
        return PROVIDERS
    if name.lower() not in PROVIDERS:
        raise ValueError(f"{source} must be one of {', '.join(PROVIDERS)}, but is {name!r}")
    return (name.lower(),)


def _load(name: str) -> tuple[NcclLibrary | None, str]:
    """Returns NCCL by way of a provider, or else why it cannot be had."""
    if name not in _loaded:
        module = importlib.import_module(f"collectives.backends.nccl.libnccl.{name}")
        try:
            symbols = Symbols(module.load())
            symbols.check_complete()
        except ProviderError as error:
            return None, str(error)
        _loaded[name] = NcclLibrary(name, symbols)
    return _loaded[name], ""


def _text(names: tuple[str, ...], reasons: list[str]) -> str:
    if len(names) == 1:
        return f"NCCL cannot be used by way of {names[0]}: {reasons[0]}"
    listed = "; ".join(f"{name}: {reason}" for name, reason in zip(names, reasons, strict=True))
    return f"no provider of NCCL can be used: {listed}"
