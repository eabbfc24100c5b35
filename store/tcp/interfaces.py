"""The addresses that a process offers to those on other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import collectives._native as _native
from collectives.errors import DistNetworkError
from collectives.store.waiting import root_of

_VARIABLES = ("COLLECTIVES_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_DISCARD_PORT = 9
"""Nothing is sent there: connecting a datagram socket only asks for the route."""


class Addresses(NamedTuple):
    """What a rank listens on.

    Attributes:
        addresses: numeric addresses of this machine; connections take them in turn.
        chosen: whether the user named the interfaces.
    """

    addresses: list[str]
    chosen: bool


class _Interface(NamedTuple):
    name: str
    address: str
    loopback: bool


def choose_addresses(store: Any, one_kernel: bool) -> Addresses:
    """Chooses the addresses of this rank.

    ``COLLECTIVES_SOCKET_IFNAME``, or else ``GLOO_SOCKET_IFNAME``, names network interfaces by commas, and
    each gives one address: the first interface of exactly that name, or whose name begins so. ``=`` in front
    of the list asks for exact names, ``^`` (or ``^=``) excludes what it names from the choice that is made
    without the variable: the address from which the store's host is reached, else that of this host's name,
    else the first that is not loopback. IPv4 goes before IPv6.

    Args:
        store: the group's store.
        one_kernel: whether all ranks run on one system, so that loopback reaches them.

    Raises:
        DistNetworkError: no interface fits; the message lists those there are.
    """
    interfaces = [_Interface(*one) for one in _native.interfaces()]
    variable = next((name for name in _VARIABLES if os.environ.get(name)), None)
    text = os.environ[variable].strip() if variable else ""
    excluded, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    names = [name.strip() for name in text.lstrip("^=").split(",") if name.strip()]
    if variable and not names:
        raise DistNetworkError(f"{variable}={text!r} names no network interface; {_listed(interfaces)}")
    if names and not excluded:
        found = [_named(name, exact, interfaces) for name in names]
        for name, address in zip(names, found, strict=True):
            if address is None:
                raise DistNetworkError(
                    f"{variable}={text!r} asks for the network interface {name!r}, which "
                    f"{socket.gethostname()!r} does not have with an address; {_listed(interfaces)}"
                )
        return Addresses([address for address in found if address is not None], True)

    def is_excluded(name: str) -> bool:
        return excluded and any(name == one or (not exact and name.startswith(one)) for one in names)

    allowed = [one for one in interfaces if not is_excluded(one.name)]
    usable = {one.address for one in allowed if one_kernel or not one.loopback}
    for address in _candidates(store, allowed, one_kernel):
        if address in usable:
            return Addresses([address], excluded)
    raise DistNetworkError(
        f"{socket.gethostname()!r} has no network address that other machines could reach"
        + (f" without those that {variable}={text!r} excludes" if excluded else "")
        + f"; name an interface in {_VARIABLES[0]}; {_listed(interfaces)}"
    )


def _named(name: str, exact: bool, interfaces: list[_Interface]) -> str | None:
    fits: list[Callable[[str], bool]] = [lambda other: other == name]
    if not exact:
        fits.append(lambda other: other.startswith(name))
    for fit in fits:
        addresses = sorted((one.address for one in interfaces if fit(one.name)), key=_rank_of)
        if addresses:
            return addresses[0]
    return None


def _rank_of(address: str) -> int:
    """Orders the addresses of an interface: IPv4, IPv6, and those that hold on one link only."""
    parsed = ipaddress.ip_address(address)
    return 2 * parsed.is_link_local + (parsed.version == 6)


def _candidates(store: Any, interfaces: list[_Interface], one_kernel: bool) -> Iterator[str]:
    """Yields addresses of this machine in order of preference."""
    host_of_store = getattr(root_of(store), "host", None)
    for host in (host_of_store, os.environ.get("MASTER_ADDR"), socket.gethostname()):
        if host:
            yield from _addresses_towards(host)
    yield from sorted((one.address for one in interfaces if not one.loopback), key=_rank_of)
    if one_kernel:
        yield from sorted((one.address for one in interfaces if one.loopback), key=_rank_of)


def _addresses_towards(host: str) -> Iterator[str]:
    """Yields the addresses of this machine from which the kernel would send to a host."""
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return
    for family, kind, protocol, _, target in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            yield str(probe.getsockname()[0])


def _listed(interfaces: list[_Interface]) -> str:
    listed = ", ".join(f"{one.name} ({one.address})" for one in interfaces)
    return f"the interfaces that are up: {listed or 'none'}"
