"""The backends by name, loaded on first use.

A backend is a module with a function ``create(options: GroupOptions) -> ProcessGroup`` and, where it can be
installed and still not work on a machine, ``unavailable() -> str | None``, which tells why.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from collectives.errors import DistBackendError
from collectives.types import default_pg_timeout

if TYPE_CHECKING:
    from collectives.process_group import ProcessGroup

__all__ = [
    "BackendSpec",
    "GroupOptions",
    "backend_names",
    "backend_spec",
    "create_group",
    "register_backend_spec",
    "why_unavailable",
]


@dataclass(slots=True)
class GroupOptions:
    """What a backend is given to make a group.

    Attributes:
        store: a store of the group's own (any ``torch.distributed.Store``); keys of other groups are out of
            its sight.
        rank: this process's rank within the group.
        size: number of ranks.
        timeout: time limit of the group's operations.
        group_name: name of the group, equal on all its ranks and unique in the job.
        group_desc: free text.
        global_ranks: ranks of the members in the default group, by group rank.
        device_id: device that the process is bound to.
        pg_options: options of the backend itself, as given by the user.
    """

    store: Any
    rank: int
    size: int
    timeout: timedelta = default_pg_timeout
    group_name: str = ""
    group_desc: str = ""
    global_ranks: tuple[int, ...] = ()
    device_id: torch.device | None = None
    pg_options: Any = None


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend that the registry knows.

    Attributes:
        name: lower-case name.
        devices: device types it serves.
        factory: makes a group; a callable, or the name of a module with ``create``.
        requires: import names of optional packages that the module needs.
        install: the command that would add what is missing.
    """

    name: str
    devices: tuple[str, ...]
    factory: str | Callable[[GroupOptions], ProcessGroup]
    requires: tuple[str, ...] = ()
    install: str = ""


_specs: dict[str, BackendSpec] = {
    spec.name: spec
    for spec in (
        BackendSpec("host", ("cpu",), "collectives.backends.host"),
        BackendSpec("gloo", ("cpu",), "collectives.backends.gloo"),
        BackendSpec("round_robin", ("cpu",), "collectives.backends.round_robin"),
    )
}


def backend_names() -> list[str]:
    """Returns the names of all known backends, sorted."""
    return sorted(_specs)


def backend_spec(name: str) -> BackendSpec:
    """Returns the entry of a backend.

    Raises:
        ValueError: the name is not known; the message lists those that are.
    """
    spec = _specs.get(name.lower()) if isinstance(name, str) else None
    if spec is None:
        raise ValueError(f"unknown backend {name!r}; known are {', '.join(backend_names())}")
    return spec


def register_backend_spec(spec: BackendSpec) -> None:
    """Adds a backend.

    Raises:
        ValueError: the name is taken.
    """
    if spec.name != spec.name.lower():
        raise ValueError(f"backend names are lower-case, but {spec.name!r} is not")
    if spec.name in _specs:
        raise ValueError(
            f"backend {spec.name!r} is already registered for {', '.join(_specs[spec.name].devices)}"
        )
    _specs[spec.name] = spec


def why_unavailable(name: str) -> str | None:
    """Returns ``None`` where the backend can be used here, else the reason and the command that mends it."""
    spec = backend_spec(name)
    missing = [package for package in spec.requires if importlib.util.find_spec(package) is None]
    if missing:
        return f"needs {', '.join(missing)}, not installed; install with: {spec.install}"
    if isinstance(spec.factory, str):
        probe = getattr(importlib.import_module(spec.factory), "unavailable", None)
        if probe is not None:
            reason: str | None = probe()
            return reason
    return None


def create_group(name: str, options: GroupOptions) -> ProcessGroup:
    """Makes a group of the named backend; called by all its ranks, blocks until they are connected.

    Raises:
        ValueError: the backend is not known.
        DistBackendError: it is known but cannot be used here; the message names the command that would mend
            it.
    """
    spec = backend_spec(name)
    reason = why_unavailable(name)
    if reason is not None:
        raise DistBackendError(f"[rank {options.rank}] backend {name!r} is not available: {reason}")
    if callable(spec.factory):
        return spec.factory(options)
    group: ProcessGroup = importlib.import_module(spec.factory).create(options)
    return group
