"""Makes MPI's communicators for the ranks of a group.

Every rank publishes in the group's store which process of MPI's world it is. When all have come and belong to
one MPI job, they make the communicators (``MPI_Comm_create_group``); no other process takes part.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from functools import partial
from typing import Any

from collectives.backends._shared.exit_reasons import blamed
from collectives.backends._shared.process_records import Liveness
from collectives.backends.mpi.libmpi import Library, job_size_error
from collectives.errors import CollectiveTimeoutError, DistBackendError, ranks_in_words
from collectives.registry.backends import GroupOptions
from collectives.store.joining.agreement import exchange
from collectives.store.records import Checked, demand, fields

__all__ = ["make_communicators"]

_JOB_VARIABLES = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID")
_CREATION_TAGS = 2**14
_LEAST_SECONDS = 1.0
"""How long MPI gets at least where the last rank came just within the time limit."""


def make_communicators(
    library: Library, options: GroupOptions, where: str, liveness: Liveness
) -> tuple[Any, Any]:
    """Returns two communicators of the group: for collectives and users' messages, and for its own messages.

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
    members = [world.Get_rank()] if options.size == 1 else _world_ranks(library, options, where, liveness)
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

    def look() -> None:
        found = None
        with contextlib.suppress(Exception):  # the store went with a rank
            found = liveness.poll_lost()
        if found is not None:
            raise blamed(f"{where} MPI_Comm_create_group:", found, {})

    options.store.set(f"mpi/calls/{options.rank}", "")
    try:
        return library.within(max(_LEAST_SECONDS, end - time.monotonic()), create, look)
    except mpi.Exception as error:
        raise DistBackendError(
            f"{where} MPI cannot make a communicator: {error}; destroy groups that are no longer used"
        ) from error
    except TimeoutError as error:
        late = [r for r in range(options.size) if not options.store.check([f"mpi/calls/{r}"])]
        who = f"{ranks_in_words(late)} came and did not call it" if late else "all ranks have called it"
        raise CollectiveTimeoutError(
            f"{where} MPI_Comm_create_group has not returned within {options.timeout.total_seconds():g} s of "
            f"making the group: {who}; look whether a process was stopped, and start the job again",
            late[0] if late else -1,
            missing_ranks=late,
        ) from error


def _world_ranks(library: Library, options: GroupOptions, where: str, liveness: Liveness) -> list[int]:
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
        lost_ranks=partial(liveness.lost_ranks, None),
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
