"""Collectives on objects: picklable ones, or plain data.

An object travels as bytes: first the sizes, then the bytes themselves, in tensors of int64 and uint8 on the
group's device. All of them block. An object that cannot be pickled raises on its rank before anything is
sent; the other ranks wait for that rank until their time limit.

Objects are unpickled on receipt, which runs code that the sender chose. With ``weights_only=True``, or with
``COLLECTIVES_OBJECTS=plain`` in the environment for all calls, nothing is pickled and no pickle is taken:
objects are plain data (``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, lists, tuples and dicts of
these, and dense tensors, which come out on the CPU).

The cost of pickling is the sender's, that of unpickling N objects the receiver's; ranks that wait meanwhile
need a time limit that allows for it. Tensors inside objects are copied through pickle, and those of an
accelerator come out on the device number they had: send tensors by the collectives on tensors.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from collectives.api.p2p import P2POp, batch_isend_irecv, irecv, isend, not_self
from collectives.api.world_state import group_rank, member_group, root_rank, world_rank
from collectives.core import plain_data
from collectives.core.arguments.validation import fail
from collectives.core.operations import ALL_GATHER, ALL_GATHER_INTO_TENSOR, BROADCAST, GATHER, SCATTER
from collectives.core.process_group import ProcessGroup
from collectives.errors import DistBackendError

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]

_VARIABLE = "COLLECTIVES_OBJECTS"


def _device(group: ProcessGroup, device: torch.device | str | None = None) -> torch.device:
    """Returns where the bytes travel: the CPU where the group takes it, else the group's current device."""
    if device is not None:
        return torch.device(device)
    kinds = group.capabilities.devices
    if "cpu" in kinds:
        return torch.device("cpu")
    kind = min(kinds)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == kind:
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device(kind)


def _is_plain(weights_only: bool) -> bool:
    """Returns whether objects are plain data; raises :class:`ValueError` for an unknown setting."""
    setting = os.environ.get(_VARIABLE) or "pickle"
    if setting not in {"pickle", "plain"}:
        raise ValueError(f"{_VARIABLE} must be pickle or plain, is {setting!r}")
    return weights_only or setting == "plain"


def _pack(
    objects: Sequence[Any], device: torch.device, weights_only: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes of all objects one after another, and the size of each."""
    write = plain_data.dumps if _is_plain(weights_only) else pickle.dumps
    parts = [write(obj) for obj in objects]
    sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    data = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8) if parts else _bytes(0, "cpu")
    return data.to(device), sizes.to(device)


def _unpack(data: torch.Tensor, sizes: Sequence[int], weights_only: bool) -> list[Any]:
    """Returns the objects whose bytes lie one after another in a tensor on the CPU."""
    view = memoryview(data.numpy().data)
    plain = _is_plain(weights_only)
    objects, begin = [], 0
    for size in sizes:
        part = view[begin : begin + size]
        # Plain data is harmless, whatever this rank asks for.
        if plain or bytes(part[: len(plain_data.MAGIC)]) == plain_data.MAGIC:
            objects.append(_plain_object(part))
        else:
            objects.append(pickle.loads(part))
        begin += size
    return objects


def _plain_object(part: memoryview) -> Any:
    try:
        return plain_data.loads(part)
    except ValueError as error:
        raise DistBackendError(
            f"a rank has sent something else than plain data: {error}; pass weights_only=True, or set "
            f"{_VARIABLE}=plain, on all ranks"
        ) from error


def _bytes(count: int, device: torch.device | str) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def _gather_sizes(group: ProcessGroup, size: torch.Tensor) -> list[int]:
    """Returns the size of every rank's object."""
    sizes = torch.empty(group.size(), dtype=torch.int64, device=size.device)
    group.call(ALL_GATHER_INTO_TENSOR, sizes, size, async_op=False).wait()
    return [int(n) for n in group.to_host(sizes).tolist()]


def all_gather_object(
    object_list: list[Any], obj: Any, group: ProcessGroup | None = None, weights_only: bool = False
) -> None:
    """Gathers every rank's object on all ranks.

    Args:
        object_list: a list of one entry for each rank, filled in place; left alone on ranks that are not in
            the group.
        obj: this rank's object; unpickled on other ranks, so trust them.
        group: the ranks that take part; ``None`` for the default group.
        weights_only: nothing but plain data, and no pickle; the same on all ranks.

    Raises:
        TypeError: ``object_list`` is no list.
        ValueError: it has not an entry for each rank.
        pickle.PicklingError: an object cannot be pickled (or :class:`TypeError`, :class:`AttributeError`);
            nothing was sent.
        DistBackendError: a rank died or passed the time limit, or sent a pickle where that is not taken.

    Example:
        With 2 ranks::

            everyone = [None, None]
            collectives.all_gather_object(everyone, {"rank": rank})  # [{"rank": 0}, {"rank": 1}] on both
    """
    target = member_group(group, "all_gather_object")
    if target is None:
        return
    _check_length(target, "all_gather_object", object_list, "object_list")
    data, size = _pack([obj], _device(target), weights_only)
    sizes = _gather_sizes(target, size)
    whole, parts = _parts(target, sizes, data.device)
    own = data if target.capabilities.uneven else _padded(data, max(sizes))
    target.call(ALL_GATHER, parts, own, async_op=False).wait()
    object_list[:] = _unpack_parts(target.to_host(whole), parts, sizes, weights_only)


def _parts(
    group: ProcessGroup, sizes: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns one buffer and a part of it for each rank; of one size where the group asks for that."""
    counts = list(sizes) if group.capabilities.uneven else [max(sizes)] * len(sizes)
    whole = _bytes(sum(counts), device)
    return whole, list(torch.split(whole, counts))


def _unpack_parts(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], sizes: Sequence[int], weights_only: bool
) -> list[Any]:
    split = torch.split(whole, [part.numel() for part in parts])
    return [_unpack(part, [size], weights_only)[0] for part, size in zip(split, sizes, strict=True)]


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    padded = torch.zeros(size, dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    return padded


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Gathers every rank's object on one rank.

    Args:
        obj: this rank's object; unpickled on the destination, which must trust it.
        object_gather_list: on the destination, a list of one entry for each rank, filled in place; ``None``
            elsewhere.
        dst: rank of the default group that gathers; without both, rank 0 of the default group.
        group: the ranks that take part; ``None`` for the default group.
        group_dst: the rank that gathers, counted within the group; instead of ``dst``.
        weights_only: nothing but plain data, and no pickle; the same on all ranks.

    Raises:
        TypeError: ``object_gather_list`` is no list on the destination.
        ValueError: it has not an entry for each rank there, another rank gives one, or the destination is not
            in the group.
        pickle.PicklingError: an object cannot be pickled (or :class:`TypeError`, :class:`AttributeError`);
            nothing was sent.
        DistBackendError: a rank died or passed the time limit, or sent a pickle where that is not taken.

    Example:
        With 2 ranks::

            everyone = [None, None] if rank == 0 else None
            collectives.gather_object({"rank": rank}, everyone, dst=0)
    """
    target = member_group(group, "gather_object")
    if target is None:
        return
    root = root_rank(target, "gather_object", dst, group_dst, "dst")
    at_root = target.rank() == root
    if at_root:
        _check_length(target, "gather_object", object_gather_list, "object_gather_list")
    elif object_gather_list:
        reason = f"object_gather_list is for the root, rank {root}; give None on this rank"
        fail(target, "gather_object", reason)
    data, size = _pack([obj], _device(target), weights_only)
    sizes = _gather_sizes(target, size)
    own = _padded(data, max(sizes))
    whole = _bytes(own.numel() * target.size(), data.device) if at_root else None
    parts = None if whole is None else list(whole.view(target.size(), -1).unbind(0))
    target.call(GATHER, parts, own, root=root, async_op=False).wait()
    if whole is not None and parts is not None and object_gather_list is not None:
        object_gather_list[:] = _unpack_parts(target.to_host(whole), parts, sizes, weights_only)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Copies one rank's objects to all ranks.

    Args:
        object_list: objects on the source; a list of equal length elsewhere, filled in place. Trust the
            source.
        src: the source, a rank of the default group; without both, rank 0 of the default group.
        group: the ranks that take part; ``None`` for the default group.
        device: where the bytes travel; ``None`` for the CPU where the group takes it.
        group_src: the source, counted within the group; instead of ``src``.
        weights_only: nothing but plain data, and no pickle; the same on all ranks.

    Raises:
        TypeError: ``object_list`` is no list.
        ValueError: the source is not in the group.
        pickle.PicklingError: an object cannot be pickled (or :class:`TypeError`, :class:`AttributeError`);
            nothing was sent.
        DistBackendError: a rank died or passed the time limit, or sent a pickle where that is not taken.

    Example:
        With 2 ranks::

            objects = ["a", {"b": 1}] if rank == 0 else [None, None]
            collectives.broadcast_object_list(objects, src=0)  # ["a", {"b": 1}] on both
    """
    target = member_group(group, "broadcast_object_list")
    if target is None:
        return
    what = "broadcast_object_list"
    root = root_rank(target, what, src, group_src, "src")
    _check_list(target, what, object_list, "object_list")
    place = _device(target, device)
    if target.rank() == root:
        data, sizes = _pack(object_list, place, weights_only)
        _broadcast(target, sizes, root)
        _broadcast(target, data, root)
        return
    sizes = torch.empty(len(object_list), dtype=torch.int64, device=place)
    _broadcast(target, sizes, root)
    counts = target.to_host(sizes).tolist()
    data = _bytes(sum(counts), place)
    _broadcast(target, data, root)
    object_list[:] = _unpack(target.to_host(data), counts, weights_only)


def _broadcast(group: ProcessGroup, tensor: torch.Tensor, root: int) -> None:
    group.call(BROADCAST, tensor, root=root, async_op=False).wait()


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Gives each rank one object of a list that one rank has.

    Args:
        scatter_object_output_list: a list of at least one entry, of which the first gets this rank's object.
        scatter_object_input_list: on the source, one object for each rank; not looked at elsewhere. Trust the
            source.
        src: the source, a rank of the default group; without both, rank 0 of the default group.
        group: the ranks that take part; ``None`` for the default group.
        group_src: the source, counted within the group; instead of ``src``.
        weights_only: nothing but plain data, and no pickle; the same on all ranks.

    Raises:
        TypeError: a list is none.
        ValueError: the source gives not an object for each rank, or is not in the group.
        pickle.PicklingError: an object cannot be pickled (or :class:`TypeError`, :class:`AttributeError`);
            nothing was sent.
        DistBackendError: a rank died or passed the time limit, or sent a pickle where that is not taken.

    Example:
        With 2 ranks::

            mine = [None]
            collectives.scatter_object_list(mine, ["zero", "one"] if rank == 0 else None, src=0)
            # ["zero"] on rank 0, ["one"] on rank 1
    """
    target = member_group(group, "scatter_object_list")
    if target is None:
        return
    what = "scatter_object_list"
    root = root_rank(target, what, src, group_src, "src")
    _check_list(target, what, scatter_object_output_list, "scatter_object_output_list")
    if not scatter_object_output_list:
        fail(target, what, "scatter_object_output_list must have room for one object, but is empty")
    place = _device(target)
    at_root = target.rank() == root
    rows: list[torch.Tensor] | None = None
    sizes = torch.zeros(target.size(), dtype=torch.int64, device=place)
    if at_root:
        objects = _check_length(target, what, scatter_object_input_list, "scatter_object_input_list")
        parts = [_pack([obj], place, weights_only) for obj in objects]
        sizes = torch.cat([size for _, size in parts])
        rows = [_padded(data, int(sizes.max())) for data, _ in parts]
    _broadcast(target, sizes, root)
    counts = target.to_host(sizes).tolist()
    own = _bytes(max(counts), place)
    target.call(SCATTER, own, rows, root=root, async_op=False).wait()
    scatter_object_output_list[0] = _unpack(target.to_host(own), [counts[target.rank()]], weights_only)[0]


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Sends objects to a rank, which calls :func:`recv_object_list` with a list of equal length.

    Args:
        object_list: the objects; unpickled by the receiver, which must trust this rank.
        dst: the receiver, a rank of the default group; not this rank.
        group: the ranks that take part; ``None`` for the default group.
        device: where the bytes travel; ``None`` for the CPU where the group takes it.
        group_dst: the receiver, counted within the group; instead of ``dst``.
        use_batch: send by ``batch_isend_irecv``, for backends whose plain sends make connections of their
            own.
        weights_only: nothing but plain data, and no pickle; the same on all ranks.

    Raises:
        TypeError: ``object_list`` is no list.
        ValueError: the receiver is this rank, or not in the group.
        pickle.PicklingError: an object cannot be pickled (or :class:`TypeError`, :class:`AttributeError`);
            nothing was sent.
        DistBackendError: a rank died or passed the time limit, or sent a pickle where that is not taken.

    Example:
        With 2 ranks::

            if rank == 0:
                collectives.send_object_list(["a", 1], dst=1)
            else:
                objects = [None, None]
                collectives.recv_object_list(objects, src=0)  # ["a", 1]
    """
    target = member_group(group, "send_object_list")
    if target is None:
        return
    peer = group_rank(target, "send_object_list", dst, group_dst, "dst")
    not_self(target, "send_object_list", peer, "destination", "a copy")
    _check_list(target, "send_object_list", object_list, "object_list")
    data, sizes = _pack(object_list, _device(target, device), weights_only)
    for tensor in (sizes, data):
        _message(isend, target, tensor, peer, use_batch)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Receives the objects of one :func:`send_object_list`.

    Args:
        object_list: a list of the sender's length, filled in place. Trust the sender.
        src: the sender, a rank of the default group; not this rank. Without both, any rank.
        group: the ranks that take part; ``None`` for the default group.
        device: where the bytes travel; ``None`` for the CPU where the group takes it.
        group_src: the sender, counted within the group; instead of ``src``.
        use_batch: as the sender has it.
        weights_only: nothing but plain data, and no pickle.

    Returns:
        The sender as a rank of the default group, or of ``group`` where ``init_process_group`` and
        ``new_group`` did not make that; -1 on a rank that is not in the group.

    Raises:
        TypeError: ``object_list`` is no list.
        ValueError: the sender is this rank, or not in the group.
        DistBackendError: a rank died or passed the time limit.
    """
    target = member_group(group, "recv_object_list")
    if target is None:
        return -1
    what = "recv_object_list"
    _check_list(target, what, object_list, "object_list")
    place = _device(target, device)
    sizes = torch.empty(len(object_list), dtype=torch.int64, device=place)
    if src is None and group_src is None:
        work = target.recv_anysource(sizes)
        work.wait()
        peer = work.source_rank()
    else:
        peer = group_rank(target, what, src, group_src, "src")
        not_self(target, what, peer, "source", "a copy")
        _message(irecv, target, sizes, peer, use_batch)
    counts = target.to_host(sizes).tolist()
    data = _bytes(sum(counts), place)
    _message(irecv, target, data, peer, use_batch)
    object_list[:] = _unpack(target.to_host(data), counts, weights_only)
    return world_rank(target, peer)


def _message(op: Any, group: ProcessGroup, tensor: torch.Tensor, peer: int, use_batch: bool) -> None:
    """Sends or receives one tensor and waits."""
    if use_batch:
        for work in batch_isend_irecv([P2POp(op, tensor, group=group, group_peer=peer)]):
            work.wait()
    else:
        (group.send if op is isend else group.recv)(tensor, peer).wait()


def _check_list(group: ProcessGroup, operation: str, objects: Any, name: str) -> list[Any]:
    if not isinstance(objects, list):
        fail(group, operation, f"{name} must be a list, but is of type {type(objects).__name__}", TypeError)
    return objects


def _check_length(group: ProcessGroup, operation: str, objects: Any, name: str) -> list[Any]:
    checked = _check_list(group, operation, objects, name)
    if len(checked) != group.size():
        reason = f"{name} must have one entry for each of {group.size()} ranks, but has {len(checked)}"
        fail(group, operation, reason)
    return checked
