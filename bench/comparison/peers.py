"""Peers of this package: public functions, all-reduces made of a backend's messages, the memory limit.

A peer turns an operation and its tensors into a call without arguments. Whatever the call needs besides
(lists of parts, partners) is made before, so that only the call is timed.

``BACKEND:ALGORITHM``, such as ``host:ring``, is an all-reduce over the messages of a backend, with the
algorithms of :mod:`collectives.backends.algorithms`: it shows what the backend's own all-reduce is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

import collectives
from collectives.backends import algorithms
from collectives.bench.comparison.operations import ROOT, Operation, partner

__all__ = ["Bind", "Call", "add_zero", "function_peer", "group_peer", "ping_pong", "split_name", "why_not"]

Call = Callable[[], object]


class Bind(Protocol):
    """What a peer is: gives the call of an operation on tensors.

    The tensors are dense and one-dimensional; ``given`` and ``result`` are the same where the operation works
    in place, and empty on ranks where it has no input or no output. The call blocks until its result is
    there.
    """

    def __call__(self, operation: Operation, given: torch.Tensor, result: torch.Tensor) -> Call:
        """Returns the call."""


_FUNCTIONS = {
    "all_gather": ("all_gather_into_tensor",),
    "reduce_scatter": ("reduce_scatter_tensor",),
    "all_to_all": ("all_to_all_single",),
    "sendrecv": ("send", "recv"),
}
"""Names of the capabilities behind an operation, where they differ from its own."""


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
    group: collectives.ProcessGroup,
    operation: Operation,
    dtype: torch.dtype,
    op: collectives.ReduceOp,
    device: str = "cpu",
    algorithm: str | None = None,
) -> str | None:
    """Returns why a group cannot do an operation on tensors of a device type, ``None`` where it can.

    Args:
        group: the group.
        operation: the operation.
        dtype: data type of the tensors.
        op: the reduction of operations that reduce.
        device: type of the device that the tensors are on.
        algorithm: name of an algorithm over the group's messages; ``None`` for the group's own operations.
    """
    if algorithm is not None:
        if operation.name != "all_reduce":
            return "is an all-reduce"
        return algorithms.why_not(group, dtype, op, device)
    for name in _FUNCTIONS.get(operation.name, (operation.name,)):
        reason = group.capabilities.why_not(
            name,
            device=None if operation.name == "barrier" else device,
            dtype=None if operation.name == "barrier" else dtype,
            op=op if operation.reduces else None,
        )
        if reason is not None:
            return reason
    return None


def group_peer(group: collectives.ProcessGroup, op: collectives.ReduceOp, algorithm: str | None) -> Bind:
    """Returns the peer that calls the public functions with a group, or an algorithm over its messages.

    Args:
        group: the group; its ranks are those of the default group.
        op: the reduction of operations that reduce.
        algorithm: name of the algorithm; ``None`` for the public functions.
    """
    if algorithm is None:
        return function_peer(collectives, group, op)
    return lambda operation, given, result: partial(  # noqa: ARG005
        algorithms.all_reduce, result, algorithm, group, op
    )


def function_peer(module: Any, group: Any, op: Any) -> Bind:
    """Returns the peer that calls the functions of ``collectives``, or those of ``torch.distributed``.

    Args:
        module: what has the functions.
        group: a group of it; its ranks are those of the default group.
        op: the reduction of operations that reduce.
    """
    rank, ranks = group.rank(), group.size()

    def ping(given: torch.Tensor, result: torch.Tensor) -> Call:
        return ping_pong(
            rank,
            ranks,
            lambda other: module.send(given, other, group),
            lambda other: module.recv(result, other, group),
        )

    def at_root(tensor: torch.Tensor) -> list[torch.Tensor] | None:
        return list(tensor.chunk(ranks)) if rank == ROOT else None

    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], Call]] = {
        "all_reduce": lambda _, result: partial(module.all_reduce, result, op, group),
        "reduce": lambda _, result: partial(module.reduce, result, op=op, group=group, group_dst=ROOT),
        "broadcast": lambda _, result: partial(module.broadcast, result, group=group, group_src=ROOT),
        "all_gather": lambda given, result: partial(module.all_gather_into_tensor, result, given, group),
        "reduce_scatter": lambda given, result: partial(
            module.reduce_scatter_tensor, result, given, op, group
        ),
        "all_to_all": lambda given, result: partial(
            module.all_to_all_single, result, given, None, None, group
        ),
        "gather": lambda given, result: partial(
            module.gather, given, at_root(result), group=group, group_dst=ROOT
        ),
        "scatter": lambda given, result: partial(
            module.scatter, result, at_root(given), group=group, group_src=ROOT
        ),
        "sendrecv": ping,
        "barrier": lambda *_: partial(module.barrier, group),
    }
    return lambda operation, given, result: calls[operation.name](given, result)


def ping_pong(rank: int, ranks: int, send: Callable[[int], object], receive: Callable[[int], object]) -> Call:
    """Returns the two messages of a ping-pong in the order of the rank; nothing for the odd rank out.

    Args:
        rank: the rank that this process is.
        ranks: number of ranks.
        send: sends to a rank.
        receive: receives from a rank.
    """
    other = partner(rank, ranks)
    if other is None:
        return lambda: None
    first, second = (send, receive) if rank < other else (receive, send)

    def call() -> None:
        first(other)
        second(other)

    return call


def add_zero(operation: Operation, given: torch.Tensor, result: torch.Tensor) -> Call:  # noqa: ARG001
    """The memory limit as a peer: reads and writes the tensor once."""
    return partial(result.add_, 0)
