"""What ranks of tests share: NCCL's interface, and groups on tensors of the CPU, over the double."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import current_store, run_ranks

from collectives.backends.nccl import NcclConfig, ProcessGroupNCCL, providers
from collectives.backends.nccl.libnccl import Communicator, NcclLibrary
from collectives.registry.backends import BackendSpec, GroupOptions, register_backend_spec
from nccl_double import NcclDouble, accesses, cuda, do
from nccl_double.calls import current_stream
from nccl_double.device import DoubleDevice, tensors_on_device, watch_as_one

SEED_VARIABLE = "COLLECTIVES_TEST_STREAMS_SEED"
"""Environment variable with the seed by which streams are held."""

SEEDS = (1, 2, 3)
"""Those of the full tier."""

_doubles: dict[Path, NcclDouble] = {}


def load(path: Path) -> NcclDouble:
    """Loads the double, before either provider is."""
    if path not in _doubles:
        _doubles[path] = NcclDouble(path)
        cuda.install()
        watch_as_one()
        os.environ["NUMBA_NCCLLIB"] = str(path.parent)
    return _doubles[path]


def make_group(
    path: Path, provider: str | None, rank: int, size: int, store: Any = None, **options: Any
) -> Any:
    """Returns a group over the double; ``options`` are further fields of :class:`GroupOptions`."""
    load(path)
    fields = {"timeout": timedelta(seconds=20), "group_name": "over the double", **options}
    given = GroupOptions(current_store() if store is None else store, rank, size, **fields)
    return ProcessGroupNCCL(given, providers.load(provider), DoubleDevice)


def register_over_double(name: str, path: Path, provider: str | None = "cupy") -> None:
    """Makes groups over the double a backend of the package, by a name."""

    def create(options: GroupOptions) -> Any:
        fields = ("timeout", "group_name", "global_ranks", "device_id", "split_from")
        about = {field: getattr(options, field) for field in fields}
        return make_group(path, provider, options.rank, options.size, options.store, **about)

    register_backend_spec(BackendSpec(name, ("cpu",), create))


@contextmanager
def host_refusing_to_wait() -> Iterator[None]:
    """Lets a wait of the host for a stream raise."""
    do("refuse_to_wait", 1)
    try:
        yield
    finally:
        do("refuse_to_wait", 0)


@contextmanager
def logged(level: int, what: str = "") -> Iterator[list[str]]:
    """Notes what the package logs meanwhile, and has something in it."""
    told: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: what in record.getMessage())
    log = logging.getLogger("collectives")
    log.addHandler(handler)
    try:
        yield told
    finally:
        log.removeHandler(handler)


def run_over_double(
    body: Callable[..., Any],
    size: int,
    path: Path,
    *args: Any,
    provider: str = "cupy",
    options: dict[str, Any] | None = None,
    on_device: bool = True,
    seed: int = 0,
    **more: Any,
) -> list[Any]:
    """Runs ``body(group, *args)`` on every rank, in new processes; returns the results by rank.

    ``more`` are arguments of :func:`harness.run_ranks`. Without ``on_device``, torch's operations do not run
    on the device's streams: the modes that carry that out would show in torch's front end. With a ``seed``,
    streams are held for a while before tasks that it draws, others on each rank.
    """
    about = path, provider, options or {}, on_device, seed
    return run_ranks(_in_group, size, *about, body, args, isolated=True, **more)


def _in_group(
    rank: int,
    size: int,
    path: Path,
    provider: str,
    options: dict[str, Any],
    on_device: bool,
    seed: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    if seed:
        os.environ[SEED_VARIABLE] = str(seed * size + rank)
    group = make_group(path, provider, rank, size, **options)
    try:
        with (
            tensors_on_device() if on_device else nullcontext(),
            DoubleDevice.shared(torch.device("cpu")).activate(),
        ):
            value = body(group, *args)
            if accesses.tensors_in(value):  # which the host reads to send them
                do("stream_synchronize", current_stream())
    except BaseException:
        group.abort()
        if SEED_VARIABLE in os.environ:
            sys.stderr.write(f"streams were held with {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}\n")
        raise
    group.shutdown()
    assert load(path).misuses() == 0, "calls used a communicator after its end"
    assert load(path).contexts() <= {DoubleDevice.number}, "a thread used another rank's device"
    return value


# ---- without a group -------------------------------------------------------------------------------------

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


def in_turn(rank: int, size: int, provider: str, path: Path, bodies: Sequence[Callable[..., None]]) -> None:
    """Runs functions one after the other, which costs one start of ranks in place of several."""
    for body in bodies:
        body(rank, size, provider, path)


def tell_version(path: Path, version: int) -> None:
    """Lets the double tell a version, and providers load it anew."""
    NcclDouble(path).set_version(version)
    providers._loaded.clear()


_ids = itertools.count()


def shared_id(library: NcclLibrary, rank: int) -> bytes:
    """Returns a unique id that rank 0 makes; all ranks ask equally often."""
    store, key = current_store(), f"id {next(_ids)}"
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
