"""All-reduces made of a backend's messages as peers: ``host:ring`` is a ring over messages of ``host``.

Names are ``BACKEND:ALGORITHM``, algorithms those of :mod:`collectives.backends.algorithms`. They show what
a backend's own all-reduce is worth.
"""

from __future__ import annotations

from functools import partial

import torch

from collectives import ProcessGroup, ReduceOp
from collectives.backends import algorithms
from collectives.bench.comparison.operations import Operation
from collectives.bench.comparison.peers import Bind, Call

__all__ = ["open_peer", "split_name", "why_not"]


def split_name(name: str) -> tuple[str, str | None]:
    """Returns the backend in a peer's name, and the algorithm; ``None`` for the backend's own operations.

    Args:
        name: of a backend of ours, or of such a peer.

    Raises:
        ValueError: there is no such algorithm.
    """
    backend, colon, algorithm = name.partition(":")
    if not colon:
        return name, None
    if algorithm not in algorithms.ALGORITHMS:
        raise ValueError(
            f"unknown algorithm {algorithm!r} in {name!r}; known are {', '.join(algorithms.ALGORITHMS)}"
        )
    return backend, algorithm


def why_not(
    group: ProcessGroup, operation: Operation, dtype: torch.dtype, op: ReduceOp, device: str = "cpu"
) -> str | None:
    """Returns why the algorithms cannot do an operation over a group, ``None`` where they can."""
    if operation.name != "all_reduce":
        return "is an all-reduce"
    return algorithms.why_not(group, dtype, op, device)


def open_peer(group: ProcessGroup, algorithm: str, op: ReduceOp) -> Bind:
    """Returns the peer that reduces by an algorithm.

    Args:
        group: the group; its ranks are those of the default group.
        algorithm: name of the algorithm.
        op: the reduction.
    """

    def bind(operation: Operation, given: torch.Tensor, result: torch.Tensor) -> Call:  # noqa: ARG001
        return partial(algorithms.all_reduce, result, algorithm, group, op)

    return bind
