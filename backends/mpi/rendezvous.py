"""How the ranks of MPI meet: at ``mpi://``, and to make the communicators of a group.

At ``mpi://`` the processes that ``mpirun`` started find each other through MPI itself. Rank and number of
ranks are those of MPI's world. Rank 0 serves a :class:`~collectives.TCPStore` on a free port and tells all
others where, by a message of MPI. Where all ranks are on one machine it listens on loopback, else on the
interface that ``COLLECTIVES_SOCKET_IFNAME`` names, or that leads to the address of the host's name.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from collectives.backends.mpi.engine import Engine
from collectives.backends.mpi.libmpi import Library, job_size_error, library
from collectives.core.types import default_pg_timeout
from collectives.errors import CollectiveTimeoutError, DistBackendError, DistStoreError, ranks_in_words
from collectives.registry.backends import GroupOptions
from collectives.store import TCPStore, register_rendezvous_handler
from collectives.store.joining.agreement import exchange
from collectives.store.records import Checked, demand, fields
from collectives.store.tcp.interfaces import choose_addresses

_JOB_VARIABLES = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID")
_CREATION_TAGS = 2**14
_LEAST_SECONDS = 1.0
"""How long MPI gets at least where the last rank came just within the time limit."""

_CREATION = "MPI_Comm_create_group"

_TAG = 28_009
"""Of the message that tells where the store is; an odd one, because users' messages go that way, too."""

_MESSAGE_BYTES = 512
_NAP_SECONDS = 0.001

_abandoned: list[Any] = []
"""Requests of messages that MPI may still send, with their memory."""


def handle_url(url: str, timeout: timedelta = default_pg_timeout) -> Iterator[tuple[TCPStore, int, int]]:
    """Yields the store, rank and size of MPI's world; the handler of ``mpi://``.

    Args:
        url: ``mpi://``, with the rank and the world size that the caller believes in, if any, in the query.
        timeout: time limit for ranks to come; afterwards that of the store.

    Raises:
        ValueError: rank or world size are not those of MPI.
        DistStoreError: rank 0 did not tell in time where the store is.
        DistBackendError: there is no MPI.
    """
    given = dict(parse_qsl(urlsplit(url).query))
    unknown = given.keys() - {"rank", "world_size"}
    if unknown:
        raise ValueError(f"{url!r} has unknown parameters {sorted(unknown)}; there are rank and world_size")
    started = library()
    world = started.mpi.COMM_WORLD
    rank, size = int(world.Get_rank()), int(world.Get_size())
    if int(given.get("world_size", size)) != size:
        raise ValueError(
            f"world_size is {given['world_size']}, but {job_size_error(size, int(given['world_size']))}"
        )
    if int(given.get("rank", rank)) != rank:
        raise ValueError(f"rank is {given['rank']}, but MPI says that this process is rank {rank} of {size}")
    started.check_thread(f"[rank {rank}] rendezvous at mpi://:")
    if rank == 0:
        yield _serve(started, size, timeout), rank, size
    else:
        host, port = _receive_address(started, rank, timeout)
        yield TCPStore(host, port, size, is_master=False, timeout=timeout), rank, size
    raise RuntimeError("a process cannot meet the others at mpi:// again through the same rendezvous")


def _serve(started: Library, size: int, timeout: timedelta) -> TCPStore:
    alone = started.local_size >= size
    host = "127.0.0.1" if alone else choose_addresses(None, one_kernel=False).addresses[0]
    store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    text = json.dumps([host, store.port]).encode().ljust(_MESSAGE_BYTES)
    message = bytearray(text)
    world = started.mpi.COMM_WORLD
    with started.lock():
        requests = [world.Isend([message, started.mpi.BYTE], other, _TAG) for other in range(1, size)]
    _complete(started, requests, timeout, "ranks did not take the address of the store")
    return store


def _receive_address(started: Library, rank: int, timeout: timedelta) -> tuple[str, int]:
    message = bytearray(_MESSAGE_BYTES)
    with started.lock():
        request = started.mpi.COMM_WORLD.Irecv([message, started.mpi.BYTE], 0, _TAG)
    _complete(started, [request], timeout, f"[rank {rank}] rank 0 did not tell where the store is")
    host, port = json.loads(message)
    return host, port


def _complete(started: Library, requests: list[Any], timeout: timedelta, what: str) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    lock = started.lock()
    while True:
        with lock:
            if started.mpi.Request.Testall(requests):
                return
        if time.monotonic() > deadline:
            break
        time.sleep(_NAP_SECONDS)
    with lock:
        for request in requests:
            request.Cancel()
        if not started.mpi.Request.Testall(requests):  # few libraries cancel what is sent
            _abandoned.extend(requests)
    raise DistStoreError(
        f"{what} within {timeout.total_seconds():g} s; all processes that mpirun started must call "
        "init_process_group"
    )


# ---- communicators ---------------------------------------------------------------------------------------


def make_communicators(
    library: Library, options: GroupOptions, where: str, engine: Engine
) -> tuple[Any, Any]:
    """Returns two communicators of the group: for collectives and users' messages, and for its own messages.

    Every rank publishes in the group's store which process of MPI's world it is. When all have come and
    belong to one MPI job, they make the communicators; no other process takes part. Below
    ``MPI_THREAD_SERIALIZED`` that has no time limit, as no other thread may call MPI.

    Raises:
        CollectiveTimeoutError: ranks did not come in time; names them.
        PeerLostError: a rank died when all had come.
        DistBackendError: the ranks are not processes of one MPI job.
    """
    mpi = library.mpi
    library.check_thread(where)
    world = mpi.COMM_WORLD
    if options.size > world.Get_size():
        raise DistBackendError(f"{where} {job_size_error(world.Get_size(), options.size)}")
    end = time.monotonic() + options.timeout.total_seconds()
    members = [world.Get_rank()] if options.size == 1 else _world_ranks(library, options, where, engine)
    first = zlib.crc32(options.group_name.encode()) % (_CREATION_TAGS // 2) * 2

    def create() -> tuple[Any, Any]:
        whole = world.Get_group()
        group, made = whole.Incl(members), []
        try:
            for tag in (first, first + 1):
                made.append(world.Create_group(group, tag))
                made[-1].Set_errhandler(mpi.ERRORS_RETURN)
        except mpi.Exception:
            for communicator in made:
                communicator.Free()
            raise
        finally:
            group.Free()
            whole.Free()
        return made[0], made[1]

    engine.note_creation()
    try:
        left = max(_LEAST_SECONDS, end - time.monotonic())
        return library.within(left, create, partial(engine.check_missing, _CREATION))
    except mpi.Exception as error:
        raise DistBackendError(
            f"{where} MPI cannot make a communicator: {error}; destroy groups that are no longer used"
        ) from error
    except TimeoutError as error:
        late = engine.not_in_creation()
        who = f"{ranks_in_words(late)} came and did not call it" if late else "all ranks have called it"
        raise CollectiveTimeoutError(
            f"{where} {_CREATION} has not returned within {options.timeout.total_seconds():g} s of making "
            f"the group: {who}; look whether a process was stopped, and start the job again",
            late[0] if late else -1,
            missing_ranks=late,
        ) from error


def _world_ranks(library: Library, options: GroupOptions, where: str, engine: Engine) -> list[int]:
    """Returns the members' ranks in MPI's world, by group rank."""
    world = library.mpi.COMM_WORLD
    mine = {
        "rank": world.Get_rank(),
        "world": world.Get_size(),
        "library": library.version,
        "job": next((os.environ[name] for name in _JOB_VARIABLES if name in os.environ), ""),
    }
    published = exchange(
        options.store,
        "mpi/members",
        options.rank,
        range(options.size),
        options.timeout,
        where,
        record=mine,
        check=_process,
        combine=list,
        read=partial(_processes, options.size),
        late=CollectiveTimeoutError,
        lost_ranks=engine.lost_ranks,
    )
    for rank, other in enumerate(published):
        for what in ("library", "world", "job"):
            if other[what] != mine[what]:
                raise DistBackendError(
                    f"{where} the ranks are not of one MPI job: {what} is {mine[what]!r} on this rank, but "
                    f"{other[what]!r} on rank {rank}; start all by one mpirun",
                    rank,
                )
    members = [other["rank"] for other in published]
    if len(set(members)) != len(members):
        raise DistBackendError(
            f"{where} the ranks are not of one MPI job: they are the processes {members} of MPI's world, "
            "some of them twice; start all by one mpirun"
        )
    return members


def _processes(size: int, answer: Any) -> list[Checked]:
    demand(isinstance(answer, list) and len(answer) == size, f"{answer!r} of {size} ranks")
    return [_process(one) for one in answer]


def _process(record: Any) -> Checked:
    """Checks which process of which job a rank is."""
    found = fields(record, rank=int, world=int, library=str, job=str)
    demand(0 <= found["rank"] < found["world"], f"process {found['rank']} of {found['world']}")
    return found


register_rendezvous_handler("mpi", handle_url)
