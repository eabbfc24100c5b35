"""Groups as objects, without a world: the experimental ``torch.distributed`` interface of that kind.

A group made here is independent: it is not registered in the world, and ranks in its methods count within it.
The current group is a property of the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch

from collectives.core.arguments.option_records import refuse_unknown_options
from collectives.core.process_group import ProcessGroup
from collectives.core.types import ReduceOp
from collectives.dynamo import leave_names_uncompiled
from collectives.registry import backends as registry
from collectives.store import rendezvous
from collectives.time_limits import time_limit

__all__ = [
    "ProcessGroup",
    "ProcessGroupFactory",
    "ReduceOp",
    "current_process_group",
    "new_group",
    "process_group",
    "register_backend",
]


class ProcessGroupFactory(Protocol):
    """Makes a group; called on all its ranks."""

    def __call__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout: timedelta,
        device: torch.device,
        **kwargs: object,
    ) -> ProcessGroup:
        """Makes a group.

        Args:
            store: a store of the group's own.
            rank: this process's rank.
            world_size: number of ranks.
            timeout: time limit of operations.
            device: device of the tensors.
            kwargs: options of the backend.

        Returns:
            This rank's group.
        """
        ...


_FIELDS = ("group_name", "group_desc", "pg_options")
"""What every backend of the registry takes beside its own options."""

_factories: dict[str, ProcessGroupFactory] = {}
_current = threading.local()


def register_backend(name: str, func: ProcessGroupFactory) -> None:
    """Adds a backend for :func:`new_group`, beside those of the registry.

    Args:
        name: the name that :func:`new_group` takes.
        func: makes this rank's group; called by each :func:`new_group` of that name.

    Raises:
        ValueError: the name is taken.
    """
    if name in _factories or name in registry.backend_names():
        raise ValueError(f"backend {name!r} is already registered")
    _factories[name] = func


def new_group(backend: str, timeout: timedelta, device: str | torch.device, **kwargs: object) -> ProcessGroup:
    """Makes a group of all processes that the environment names (``env://``); blocks until all have come.

    Called by all ranks, in the same order. The group is independent of the world and of
    ``init_process_group``.

    Args:
        backend: name.
        timeout: time limit for ranks to come and of operations.
        device: device of the tensors.
        kwargs: options of the backend itself by their names, the same on every rank. Those of the registry
            also take ``group_name``, ``group_desc`` and ``pg_options``: the options as
            ``init_process_group`` takes them, which stand alone.

    Returns:
        This rank's group; ``shutdown()`` ends it.

    Raises:
        ValueError: the backend is not known, or does not serve the device; or ``timeout`` is not positive.
        TypeError: it has no such option, or ``timeout`` is no ``timedelta``; raised before ranks meet.
    """
    place = torch.device(device)
    timeout = time_limit(timeout)
    if backend not in _factories:
        served = registry.backend_spec(backend).devices
        if place.type not in served:
            raise ValueError(f"backend {backend!r} does not serve {place}, only {', '.join(served)}")
        _check_options(backend, kwargs)
    base, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    base.set_timeout(timeout)
    name, desc, record = (kwargs.pop(field, None) for field in _FIELDS)
    about = registry.meet_outside_world(base, rank, size, backend, timeout)
    if backend in _factories:
        return _factories[backend](about.store, rank, size, timeout, place, **kwargs)
    about.device_id = place
    about.pg_options = (kwargs or None) if record is None else record
    if name is not None:
        about.group_name = str(name)
    if desc is not None:
        about.group_desc = str(desc)
    return registry.create_group(backend, about)


def _check_options(backend: str, given: Mapping[str, object]) -> None:
    """Raises TypeError where a backend of the registry does not take options of these names."""
    where = f"options of a {backend} group:"
    own = {name: value for name, value in given.items() if name not in _FIELDS}
    record = given.get("pg_options")
    if own and record is not None:
        raise TypeError(f"{where} pg_options stand alone, but {', '.join(sorted(own))} came with them")
    known = registry.option_names(backend)
    if known is not None:
        refuse_unknown_options(own, (*known, *_FIELDS), where)
        refuse_unknown_options(
            record if isinstance(record, Mapping) else {}, known, f"pg_options of a {backend} group:"
        )


def current_process_group() -> ProcessGroup | None:
    """Returns the current group of this thread; ``None`` outside of :func:`process_group`."""
    group: ProcessGroup | None = getattr(_current, "group", None)
    return group


@contextmanager
def process_group(pg: ProcessGroup) -> Generator[None]:
    """Makes a group the current one of this thread inside the ``with`` block.

    Args:
        pg: the group.
    """
    before = current_process_group()
    _current.group = pg
    try:
        yield
    finally:
        _current.group = before


leave_names_uncompiled(globals())
