"""Messages between two ranks, with the names and meanings of ``torch.distributed``.

A send and a receive match by sender, receiver and tag, in the order of their calls. Ranks in arguments are
ranks of the default group; ``group_src`` and ``group_dst`` count within the group. On a rank that is not in
the group, a call warns and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from collectives.api.world_state import group_rank, member_group, own_group, world_rank
from collectives.core.arguments.validation import check_tensor, fail, received, sent
from collectives.core.process_group import ProcessGroup
from collectives.core.work import Work
from collectives.dynamo import Uncompiled

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Begins to send a tensor; it must not be changed until the Work is done.

    Args:
        tensor: what is sent, of any shape.
        dst: the receiver, a rank of the default group; may be this rank.
        group: has both ranks in it; ``None`` for the default group.
        tag: number that the receive must name too.
        group_dst: the receiver, counted within the group; instead of ``dst``.

    Returns:
        The Work; ``None`` on a rank that is not in the group.

    Raises:
        ValueError: no receiver or two are given, it is not in the group, or ``tag`` is negative.
        UnsupportedOperationError: the group does not take such a device or data type, or tags.
        DistBackendError: from ``Work.wait()``: the receiver died, or the time limit passed.

    Example:
        With 2 ranks::

            if rank == 0:
                work = collectives.isend(torch.ones(2), dst=1)
            else:
                work = collectives.irecv(torch.empty(2), src=0)
            work.wait()
    """
    target = member_group(group, "isend")
    if target is None:
        return None
    return _begin(target, True, tensor, group_rank(target, "isend", dst, group_dst, "dst"), tag)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Begins to receive a tensor; it must not be touched until the Work is done.

    Args:
        tensor: of the size and data type of the message; output.
        src: the sender, a rank of the default group; may be this rank. Without both, any rank:
            ``Work.source_rank()`` then tells which, counted within the group.
        group: has both ranks in it; ``None`` for the default group.
        tag: number that the send must name too.
        group_src: the sender, counted within the group; instead of ``src``.

    Returns:
        The Work; ``None`` on a rank that is not in the group.

    Raises:
        ValueError: two senders are given, it is not in the group, or ``tag`` is negative.
        UnsupportedOperationError: the group does not take such a device or data type, or tags.
        DistBackendError: from ``Work.wait()``: the sender died, the time limit passed, or the message has
            another size.
    """
    target = member_group(group, "irecv")
    if target is None:
        return None
    if src is None and group_src is None:
        return target.recv_anysource(tensor, tag)
    return _begin(target, False, tensor, group_rank(target, "irecv", src, group_src, "src"), tag)


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Sends a tensor; blocks until it may be changed.

    Args:
        tensor: what is sent, of any shape.
        dst: the receiver, a rank of the default group; not this rank.
        group: has both ranks in it; ``None`` for the default group.
        tag: number that the receive must name too.
        group_dst: the receiver, counted within the group; instead of ``dst``.

    Raises:
        ValueError: no receiver or two are given, it is this rank or not in the group, or ``tag`` is negative.
        UnsupportedOperationError: the group does not take such a device or data type, or tags.
        PeerLostError: the receiver died.
        CollectiveTimeoutError: not within the group's time limit; whether the group is usable then, the error
            says where the backend knows.

    Example:
        With 2 ranks::

            if rank == 0:
                collectives.send(torch.ones(2), dst=1)
            else:
                tensor = torch.empty(2)
                collectives.recv(tensor, src=0)  # [1.0, 1.0]
    """
    target = member_group(group, "send")
    if target is None:
        return
    peer = group_rank(target, "send", dst, group_dst, "dst")
    not_self(target, "send", peer, "destination", "isend")
    if target.fast_message(True, tensor, peer, tag) is None:
        target.send(tensor, peer, tag).wait()


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receives a tensor; blocks until it is complete.

    Args:
        tensor: of the size and data type of the message; output.
        src: the sender, a rank of the default group; not this rank. Without both, any rank.
        group: has both ranks in it; ``None`` for the default group.
        tag: number that the send must name too.
        group_src: the sender, counted within the group; instead of ``src``.

    Returns:
        The sender as a rank of the default group, or of ``group`` where ``init_process_group`` and
        ``new_group`` did not make that; -1 on a rank that is not in the group.

    Raises:
        ValueError: two senders are given, it is this rank or not in the group, or ``tag`` is negative.
        UnsupportedOperationError: the group does not take such a device or data type, or tags.
        PeerLostError: the sender died.
        CollectiveTimeoutError: nothing complete came within the group's time limit; a part of the tensor may
            be overwritten. Whether the group is usable then, the error says where the backend knows.
    """
    target = member_group(group, "recv")
    if target is None:
        return -1
    if src is None and group_src is None:
        work = target.recv_anysource(tensor, tag)
        work.wait()
        return world_rank(target, work.source_rank())
    peer = group_rank(target, "recv", src, group_src, "src")
    not_self(target, "recv", peer, "source", "irecv")
    if target.fast_message(False, tensor, peer, tag) is None:
        target.recv(tensor, peer, tag).wait()
    return world_rank(target, peer) if src is None else src


def _begin(group: ProcessGroup, sends: bool, tensor: torch.Tensor, peer: int, tag: int) -> Work:
    work = group.fast_message(sends, tensor, peer, tag, True)
    if work is None:
        work = (group.send if sends else group.recv)(tensor, peer, tag)
    return work


def not_self(group: ProcessGroup, operation: str, peer: int, role: str, instead: str) -> None:
    """Checks that a blocking call does not name its own rank, which it would wait for for ever.

    Raises:
        ValueError: it does.
    """
    if peer == group.rank():
        fail(group, operation, f"the {role} is this rank itself (rank {peer} of the group); use {instead}")


class P2POp(Uncompiled):
    """One message of :func:`batch_isend_irecv`.

    Args:
        op: :func:`isend` or :func:`irecv`.
        tensor: the message, or where to put it.
        peer: the other rank, a rank of the default group.
        group: has both ranks in it; ``None`` for the default group.
        tag: number that both sides name.
        group_peer: the other rank, counted within the group; instead of ``peer``.

    Raises:
        ValueError: ``op`` is neither function, or the peer is not in the group.
        TypeError: ``tensor`` is no tensor.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError(f"op must be isend or irecv, but is {op!r}")
        own = own_group(group)
        if own is None:
            raise ValueError("P2POp: this rank is not in the given group; only members take part in a batch")
        self.op = op
        self.group = own
        self.tensor = check_tensor(self.group, "P2POp", tensor)
        self.group_peer = group_rank(self.group, "P2POp", peer, group_peer, "peer")
        self.peer = world_rank(self.group, self.group_peer) if peer is None else peer
        self.tag = tag

    def __repr__(self) -> str:
        own, other = self.group.rank(), self.group_peer
        source, destination = (own, other) if self.op is isend else (other, own)
        return (
            f"P2POp({self.op.__name__} {self.group!r}, group_src={source}, group_dst={destination}, "
            f"tag={self.tag}, "
            f"shape {list(self.tensor.shape)}, {self.tensor.dtype})"
        )


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Begins several sends and receives on one group, in order; with NCCL, together.

    The sequence must match that of the peers. Any ranks of the group may take part.

    Args:
        p2p_op_list: the messages.

    Returns:
        One Work for each; wait for all of them.

    Raises:
        ValueError: the list is empty, holds something else than :class:`P2POp`, or more than one group; or a
            message cannot be sent or received. Nothing is sent then.
        UnsupportedOperationError: the group does not offer such a message. Nothing is sent then.

    Example:
        With 2 ranks::

            peer, received = 1 - rank, torch.empty(2)
            sends = collectives.P2POp(collectives.isend, torch.full((2,), float(rank)), peer)
            receives = collectives.P2POp(collectives.irecv, received, peer)
            for work in collectives.batch_isend_irecv([sends, receives]):
                work.wait()
    """
    if not isinstance(p2p_op_list, list) or not p2p_op_list:
        raise ValueError(f"p2p_op_list must be a list of at least one P2POp, but is {p2p_op_list!r}")
    for op in p2p_op_list:
        if not isinstance(op, P2POp):
            raise ValueError(f"p2p_op_list must hold P2POp objects only, but holds {op!r}")
    group = p2p_op_list[0].group
    for op in p2p_op_list:
        if op.group is not group:
            raise ValueError(f"a batch runs on one group, but this one names {group!r} and {op.group!r}")
    for op in p2p_op_list:  # all of them before the first leaves
        (sent if op.op is isend else received)(group, op.tensor, op.group_peer, op.tag)
    with group._together():
        return [_begin(group, op.op is isend, op.tensor, op.group_peer, op.tag) for op in p2p_op_list]
