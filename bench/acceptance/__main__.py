"""The program of a rank, started by :func:`.run_ranks`."""

from __future__ import annotations

import sys

import torch

from collectives.bench.acceptance import failures, streams
from collectives.bench.acceptance.platform import load
from collectives.bench.acceptance.ranks import Context
from collectives.bench.core.ranks import LOCALHOST, TIMEOUT
from collectives.store import TCPStore


def _main(words: list[str]) -> None:
    """Runs the body.

    Args:
        words: module of the platform, name of the body, rank, number of ranks, port of the parent's store,
            and folder for the answer.
    """
    module, body, rank, size, port, folder = words
    torch.set_num_threads(1)
    platform = load(module)
    platform.take(int(rank), int(size))
    store = TCPStore(LOCALHOST, int(port), is_master=False, timeout=TIMEOUT)
    context = Context(platform, int(rank), int(size), store, folder)
    {**failures.CASES, **streams.CASES}[body].body(context)
    if body in streams.CASES:  # others leave operations behind that never end
        platform.finish()


if __name__ == "__main__":
    _main(sys.argv[1:])
