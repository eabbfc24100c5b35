"""Where a server listens: a store's, and a rank's."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import re
import socket

from collectives.errors import DistNetworkError

PORT_RANGE_VARIABLE = "COLLECTIVES_PORT_RANGE"
ANY_PORT = 0
"""Lets the system choose."""
_PORT_ATTEMPTS = 16


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Opens the sockets on which a server for ``host`` listens.

    * ``localhost`` and loopback addresses: loopback only; for ``localhost`` both of IPv4 and IPv6 where there
      are both.
    * An IP address of this machine: exactly that address.
    * An IP address of no interface of this machine (behind address translation), or a host name: all
      interfaces, because other machines may resolve the name, or route the address, to any of them.

    Args:
        host: name or address that clients connect to.
        port: 0 takes a free one, the same for all sockets: of those that ``COLLECTIVES_PORT_RANGE`` names, or
            else of the system's choice.

    Raises:
        DistNetworkError: the port, or all of the range, is in use or not allowed.
        ValueError: ``port`` is none, or the variable is no range.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be from 0 to 65535, is {port}")
    ports = [port] if port else ports_to_try()
    if ports == [ANY_PORT]:
        ports *= _PORT_ATTEMPTS  # what the system chose for one address family may be taken in the other
    in_use: OSError | None = None
    for attempt in ports:
        try:
            return _open(host, attempt)
        except OSError as error:  # noqa: PERF203
            if error.errno != errno.EADDRINUSE:
                raise _listen_error(host, attempt, error) from error
            in_use = error
    if in_use is not None and (port or ports[0] == ANY_PORT):
        raise _listen_error(host, port, in_use) from in_use
    raise DistNetworkError(
        f"cannot listen on {host}: all of the {len(ports)} ports of "
        f"{PORT_RANGE_VARIABLE}={os.environ[PORT_RANGE_VARIABLE]} are in use; make the range wider"
    )


def adopt_listener(fd: int, port: int) -> socket.socket:
    """Takes over a descriptor of a bound stream socket, and makes it listen.

    Args:
        fd: the descriptor; the server closes it in the end.
        port: the port that it must be bound to; 0 for any.

    Raises:
        ValueError: ``fd`` is no such socket, or is bound to another port; the descriptor is left open.
    """
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise ValueError(f"master_listen_fd {fd} is no socket: {error.strerror}") from error
    try:
        if sock.family not in {socket.AF_INET, socket.AF_INET6} or sock.type != socket.SOCK_STREAM:
            raise ValueError(f"master_listen_fd {fd} is no TCP socket but {sock.family!r}, {sock.type!r}")
        bound = sock.getsockname()[1]
        if bound == 0:
            raise ValueError(f"master_listen_fd {fd} is not bound to a port")
        if port not in {0, bound}:
            raise ValueError(f"master_listen_fd {fd} is bound to port {bound}, but port is {port}")
        sock.listen(socket.SOMAXCONN)
        sock.setblocking(False)
    except OSError as error:
        sock.detach()
        raise ValueError(f"cannot listen on master_listen_fd {fd}: {error.strerror}") from error
    except ValueError:
        sock.detach()
        raise
    return sock


def is_loopback(host: str) -> bool:
    """Tells whether a server for ``host`` listens on loopback only."""
    address = literal_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _open(host: str, port: int) -> list[socket.socket]:
    if host == "localhost":
        return _open_loopbacks(port)
    address = literal_address(host)
    if address is not None and not address.is_unspecified:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        try:
            return [_listener(family, host, port)]
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or address.is_loopback:
                raise
    if address is not None and address.version == 4 and address.is_unspecified:
        return [_listener(socket.AF_INET, "0.0.0.0", port)]  # noqa: S104
    try:
        return [_listener(socket.AF_INET6, "::", port, both_families=True)]
    except OSError as error:
        if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
            raise
    return [_listener(socket.AF_INET, "0.0.0.0", port)]  # noqa: S104


def _open_loopbacks(port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            sockets.append(_listener(family, address, sockets[0].getsockname()[1] if sockets else port))
        except OSError as error:  # noqa: PERF203
            if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                for sock in sockets:
                    sock.close()
                raise
            missing = error
    if not sockets and missing is not None:
        raise missing
    return sockets


def _listener(family: int, host: str, port: int, both_families: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier run that linger in TIME_WAIT must not keep the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both_families else 1)
        sock.bind((host, port))
        sock.listen(socket.SOMAXCONN)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def literal_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns an address in numbers; ``None`` for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _listen_error(host: str, port: int, error: OSError) -> DistNetworkError:
    if error.errno == errno.EADDRINUSE:
        return DistNetworkError(
            f"The server socket has failed to listen on any local address of {host}:{port} (EADDRINUSE): "
            f"port {port} is already in use on this machine, by another job, a process left over, or another "
            f"process with RANK=0 of this job? `ss -ltnp 'sport = :{port}'` shows who holds it. Choose "
            "another port (MASTER_PORT), or port 0 and read the store's .port"
        )
    if error.errno == errno.EACCES:
        return DistNetworkError(
            f"no permission to listen on {host}:{port}: ports below 1024 are reserved; choose a higher one"
        )
    return DistNetworkError(f"cannot listen on {host}:{port}: {error.strerror or error}")


def ports_to_try() -> list[int]:
    """Returns ports to listen on, to be tried in this order.

    Without the variable that is :data:`ANY_PORT` alone; else all ports of the range, from one that differs
    from process to process, so that ranks that start together seldom want the same one.

    Raises:
        ValueError: the variable is no range of ports.
    """
    text = os.environ.get(PORT_RANGE_VARIABLE, "").strip()
    if not text:
        return [ANY_PORT]
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 0 < first <= last < 2**16:
        raise ValueError(
            f"{PORT_RANGE_VARIABLE}={text!r} is no range of ports; write the first and the last one, from 1 "
            "to 65535, as in 30000-30199"
        )
    ports = list(range(first, last + 1))
    start = random.randrange(len(ports))  # noqa: S311 - no secret
    return ports[start:] + ports[:start]
