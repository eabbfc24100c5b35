"""The program of a rank: ``python -m collectives.ranks.launched ADDRESS [RANK]``.

Without a rank, ``mpirun`` has started it.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
from collections.abc import Sequence

import cloudpickle

from collectives.ranks.mpirun import world_rank
from collectives.ranks.processes import Failed, commands, connect, signal_at_end_of_parent


def _main(address: str, own: Sequence[str]) -> None:
    rank = int(own[0]) if own else world_rank()
    if own:
        signal_at_end_of_parent(signal.SIGKILL)
    with connect(address, rank) as connection:
        work = next(commands(connection), None)
        if work is None:  # the parent has gone
            return
        try:
            sys.path[:], called = work
            body, args = pickle.loads(called)  # which may need the modules there
            body(rank, connection, *args)
            for command in commands(connection):
                raise RuntimeError(
                    f"rank {rank} has done its work, but was given another command: {command!r}"
                )
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            with contextlib.suppress(OSError):
                connection.send_bytes(cloudpickle.dumps(Failed.of(rank, error)))
            sys.exit(1)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
