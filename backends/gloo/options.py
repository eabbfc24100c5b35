"""Options of the gloo backend: the user's, and the network interfaces that the environment names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as torch_distributed

from collectives.errors import DistBackendError
from collectives.registry.backends import GroupOptions, refuse_unknown_options

__all__ = ["connects_on_demand", "gloo_options", "option_names"]


def option_names() -> tuple[str, ...]:
    """Returns the names of the options, which are those of torch."""
    return ("_threads", "_devices")


def gloo_options(options: GroupOptions) -> Any:
    """Returns the options of torch's group: those that the user gave, completed.

    Raises:
        TypeError: the user gave something else.
    """
    kind: Any = torch_distributed.ProcessGroupGloo._Options  # type: ignore[attr-defined]
    given = options.pg_options
    if isinstance(given, Mapping):
        where = f"[rank {options.rank}] pg_options of the gloo backend:"
        refuse_unknown_options(given, option_names(), where)
        given = _from_fields(kind(), given, where)
    if given is not None and not isinstance(given, kind):
        raise TypeError(
            f"[rank {options.rank}] pg_options of the gloo backend must be a "
            f"torch.distributed.ProcessGroupGloo._Options, but is {given!r} of type "
            f"{type(given).__name__}"
        )
    made = kind() if given is None else given
    made._timeout = options.timeout
    if not made._devices:
        made._devices = [_device(name) for name in _interfaces()]
    return made


def _from_fields(record: Any, given: Mapping[str, Any], where: str) -> Any:
    """Returns torch's record with some of its fields set."""
    name = ""
    try:
        for name in given:
            setattr(record, name, given[name])
    except TypeError as error:
        raise TypeError(f"{where} {name} cannot be {given[name]!r}: {error}") from error
    return record


def connects_on_demand() -> bool:
    """Returns whether ``TORCH_GLOO_LAZY_INIT`` asks to connect two ranks only when they first need it."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").strip().lower() in {"1", "t", "true", "y", "yes"}


def _interfaces() -> Iterator[str | None]:
    names = os.environ.get("COLLECTIVES_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    yield from chosen or (None,)


def _device(interface: str | None) -> Any:
    kind = torch_distributed.ProcessGroupGloo
    try:
        if interface is None:
            return kind.create_default_device(lazy_init=connects_on_demand())
        return kind.create_device(interface=interface, lazy_init=connects_on_demand())
    except RuntimeError as error:
        raise DistBackendError(
            f"Gloo cannot use the network interface {interface or 'of the host name'!r}: {error}; set "
            "COLLECTIVES_SOCKET_IFNAME to one that is up, such as lo on a single machine"
        ) from error
