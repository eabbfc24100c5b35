"""Rendezvous: how the processes of a job find each other and learn their ranks.

A rendezvous yields a store that all processes share, the rank of this one, and their number. URLs:

===================  =====================================================================================
``env://``           the variables ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE`` say all;
                     set by ``torchrun``, whose agent then runs the store, or by hand
``tcp://host:port``  rank 0 serves a :class:`~collectives.TCPStore` there, unless ``torchrun``'s agent does:
                     on ``MASTER_PORT``
``file:///path``     a :class:`~collectives.FileStore` that all processes can reach
===================  =====================================================================================

Rank and world size are arguments, or part of the URL: ``tcp://10.0.0.1:29500?rank=0&world_size=4``. Every
process states its own rank; none is ever assigned. The timeout is also the store's time limit afterwards.
"""

from __future__ import annotations

import operator
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Store as TorchStore

from collectives.store.file import FileStore
from collectives.store.tcp import TCPStore
from collectives.store.tcp.listen import literal_address
from collectives.store.tcp.store import is_of_agent

_Place = tuple[TorchStore, int, int]
"""The store, this rank, and the number of ranks."""

Rendezvous = Iterator[_Place]
Handler = Callable[..., Rendezvous]

_handlers: dict[str, Handler] = {}
_PLACES = ("rank", "world_size")


class _UnknownSchemeError(ValueError, RuntimeError):
    """No handler: a wrong argument, for which torch raises RuntimeError."""


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Makes URLs of a scheme of your own usable with :func:`rendezvous` and ``init_process_group``.

    Args:
        scheme: what stands before ``://``.
        handler: called with the URL (rank and world size in its query) and the keyword arguments of
            :func:`rendezvous`; returns an iterator over (store, rank, world size).

    Raises:
        RuntimeError: the scheme has a handler already.
    """
    if scheme in _handlers:
        raise RuntimeError(f"there is a rendezvous handler for {scheme}:// already: {_handlers[scheme]!r}")
    _handlers[scheme] = handler


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: object) -> Rendezvous:
    """Finds the other processes of the job by a URL.

    All of them must call it. It blocks in the first ``next`` on the result: rank 0 until all have come,
    the others until they have reached rank 0's store.

    Args:
        url: where to find them; see the module for the schemes.
        rank: rank of this process, from 0; -1 if the URL or the environment says it.
        world_size: number of processes; -1 likewise.
        kwargs: for the handler; those of this module take ``timeout``, a :class:`datetime.timedelta`, and,
            where they make a :class:`~collectives.TCPStore`, its ``wait_for_workers``.

    Returns:
        An iterator that yields (store, rank, world size) once.

    Raises:
        ValueError: unknown scheme (a RuntimeError, too, as in torch), missing or contradictory
            parameters, rank out of range (the latter from ``next``).
        DistNetworkError: from ``next``: rank 0 cannot listen there, or does not answer.
        DistStoreError: from ``next``: not all processes came in time.
    """
    if not isinstance(url, str):
        raise TypeError(f"url must be a str, not {type(url).__name__}: {url!r}")
    parts = urlsplit(url)
    if parts.scheme not in _handlers:
        known = ", ".join(f"{scheme}://" for scheme in sorted(_handlers))
        meant = "" if "://" in url else f" Is tcp://{url} meant?"
        raise _UnknownSchemeError(
            f"No rendezvous handler for {url!r}; there are {known} (register_rendezvous_handler adds one)."
            f"{meant}"
        )
    query = _query(parts)
    for name, number in zip(_PLACES, (operator.index(rank), operator.index(world_size)), strict=True):
        if number == -1:
            continue
        if query.get(name, str(number)) != str(number):
            raise ValueError(f"{name} is {query[name]} in {url!r}, but {number} as an argument")
        query[name] = str(number)
    # Not geturl(), which does not keep the number of slashes before a path.
    start = url.partition("#")[0].partition("?")[0]
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    return _handlers[parts.scheme](f"{start}?{urlencode(query)}{fragment}", **kwargs)


def _meet_at_env(url: str, timeout: timedelta = default_pg_timeout, wait_for_workers: bool = True) -> _Place:
    query = _checked_query(url)
    wanted = {"RANK": query.get("rank"), "WORLD_SIZE": query.get("world_size")}
    found = {name: given or os.environ.get(name) for name, given in wanted.items()}
    found.update({name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")})
    if not found["MASTER_ADDR"] and found["RANK"] == "0" and not is_of_agent(found["MASTER_PORT"]):
        found["MASTER_ADDR"] = socket.gethostname()  # only the others need to be told
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise ValueError(
            f"env:// rendezvous needs environment variables that are not set: {', '.join(missing)}. torchrun "
            "sets them all; by hand: MASTER_ADDR and MASTER_PORT to the address and a free port of rank 0's "
            "machine, equal on all ranks, WORLD_SIZE to the number of processes, RANK to a number of its own "
            "for each, from 0 (RANK and WORLD_SIZE may be arguments instead)"
        )
    values = {name: value for name, value in found.items() if value}
    rank, world_size = _place(
        "env://", _number("RANK", values["RANK"]), _number("WORLD_SIZE", values["WORLD_SIZE"])
    )
    port = _number("MASTER_PORT", values["MASTER_PORT"])
    return _tcp_store(values["MASTER_ADDR"], port, rank, world_size, timeout, query, wait_for_workers)


def _meet_at_tcp(url: str, timeout: timedelta = default_pg_timeout, wait_for_workers: bool = True) -> _Place:
    parts = urlsplit(url)
    query = _checked_query(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"tcp:// rendezvous: {error} in {url!r}") from error
    if not parts.hostname or port is None:
        raise ValueError(f"host or port number missing: tcp:// rendezvous needs tcp://host:port, not {url!r}")
    rank, world_size = _place(url, *_given_place(query, url))
    return _tcp_store(parts.hostname, port, rank, world_size, timeout, query, wait_for_workers)


def _meet_at_file(url: str, timeout: timedelta = default_pg_timeout) -> _Place:
    """The path is everything between the (empty) host and the query, as it stands.

    Nothing is decoded, so that an ordinary path can be pasted. URLs written for Windows are thus Linux paths
    here: ``file:///d:/dir/file`` is ``/d:/dir/file``, ``file://////machine/share/file`` is
    ``////machine/share/file``.
    """
    parts = urlsplit(url)
    query = _checked_query(url)
    if parts.netloc not in {"", "localhost"}:
        raise ValueError(
            f"file:// rendezvous needs a path on this machine, but {url!r} names the host {parts.netloc!r}; "
            f"three slashes begin a path: file:///{parts.netloc}{parts.path}"
        )
    if not parts.path or parts.fragment:
        said = "" if parts.path else "path missing: "
        raise ValueError(f"{said}file:// rendezvous needs a path without '#': file:///path, not {url!r}")
    rank, world_size = _place(url, *_given_place(query, url))
    store = FileStore(parts.path, world_size)
    store.set_timeout(timeout)
    return store, rank, world_size


def _tcp_store(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    query: Mapping[str, str],
    wait_for_workers: bool,
) -> _Place:
    if not 0 <= port < 2**16:
        raise ValueError(f"the port must be from 0 to 65535, is {port}")
    if port == 0 and world_size > 1:
        raise ValueError(
            f"port 0 lets rank 0 choose a port that the other {world_size - 1} ranks cannot know; name one, "
            "or make a TCPStore with port 0, hand its .port to them, and pass the store to init_process_group"
        )
    if re.search(r"[/\[\]]|^[^:]*:[^:]*$", host):
        raise ValueError(
            f"MASTER_ADDR must be a name or an address alone, is {host!r}; the port is MASTER_PORT"
        )
    if (address := literal_address(host)) is not None and address.is_multicast:
        raise ValueError(
            f"{host} is a multicast address, which rendezvous does not support: name rank 0's machine"
        )
    master = rank == 0 and not is_of_agent(port)
    libuv = query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"
    store = TCPStore(
        host,
        port,
        world_size,
        master,
        timeout,
        wait_for_workers,
        multi_tenant=not is_of_agent(port),
        use_libuv=libuv,
    )
    return store, rank, world_size


def _query(parts: SplitResult) -> dict[str, str]:
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ValueError(f"cannot read the query of {parts.geturl()!r}: {error}") from error
    return dict(pairs)


def _checked_query(url: str) -> dict[str, str]:
    """Returns the query of a URL of this module's schemes."""
    query = _query(urlsplit(url))
    # torch's URLs may choose an implementation of the server; ours has one, and tells what was said.
    unknown = query.keys() - {*_PLACES, "use_libuv"}
    if unknown:
        raise ValueError(f"{url!r} has unknown parameters {sorted(unknown)}; there are rank and world_size")
    return query


def _given_place(query: Mapping[str, str], url: str) -> tuple[int, int]:
    missing = [f"{name} parameter missing" for name in _PLACES if name not in query]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} for rendezvous at {url!r}: pass rank and world_size as arguments, or in "
            "the URL as ?rank=0&world_size=2"
        )
    return _number("rank", query["rank"]), _number("world_size", query["world_size"])


def _place(url: str, rank: int, world_size: int) -> tuple[int, int]:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1 for rendezvous at {url!r}, is {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is out of range for rendezvous at {url!r}: world_size is {world_size}, so ranks "
            f"are 0 to {world_size - 1}"
        )
    return rank, world_size


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, is {value!r}") from None


def _register(scheme: str, meet: Callable[..., _Place]) -> None:
    def handler(url: str, **options: object) -> Rendezvous:
        yield meet(url, **options)
        raise RuntimeError(
            f"a process cannot meet the others at {scheme}:// again through the same rendezvous"
        )

    register_rendezvous_handler(scheme, handler)


_register("env", _meet_at_env)
_register("file", _meet_at_file)
_register("tcp", _meet_at_tcp)
