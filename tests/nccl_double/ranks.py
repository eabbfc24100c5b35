"""What ranks of the tests of NCCL's interface share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import current_store, run_ranks

from collectives.backends.nccl.libnccl import providers
from collectives.backends.nccl.libnccl.interface import Communicator, NcclConfig, NcclLibrary
from nccl_double import NcclDouble

PROVIDERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed"),
    )
    for name in providers.PROVIDERS
]


def on(
    provider: str, path: Path, function: object, size: int, *args: object, **options: object
) -> list[object]:
    """Runs a function on ranks of their own, which end with it: the double stays with a process."""
    return run_ranks(function, size, provider, path, *args, isolated=True, **options)


def shared_id(library: NcclLibrary, rank: int, key: str = "id") -> bytes:
    """Returns a unique id that rank 0 makes."""
    store = current_store()
    if rank == 0:
        store.set(key, library.unique_id())
    return bytes(store.get(key))


@contextmanager
def connected(
    rank: int, size: int, provider: str, path: Path, config: NcclConfig | None = None
) -> Iterator[tuple[NcclDouble, NcclLibrary, Communicator]]:
    """Loads double and provider and connects the ranks; checks that nothing is left at the end."""
    double = NcclDouble(path)
    library = providers.load(provider)
    communicator = library.init(shared_id(library, rank), size, rank, config)
    yield double, library, communicator
    if not communicator.ended:
        communicator.destroy()
    assert communicator.handle == 0
    assert double.misuses() == 0
    assert double.communicators() == 0
