"""Makes the groups that torch asks for, and makes the world known to torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from collectives.api.debug import checked
from collectives.api.groups import local_turn
from collectives.api.world_state import default_group, get_backend, group_record, world
from collectives.core import profiling
from collectives.core.arguments.option_records import BackendOptions, is_general
from collectives.core.forwarding import group_behind
from collectives.core.operations import BROADCAST
from collectives.core.process_group import ProcessGroup
from collectives.core.work import Work
from collectives.dynamo import leave_uncompiled
from collectives.errors import DistError
from collectives.registry.backends import (
    GroupOptions,
    backend_spec,
    create_group,
    meet_outside_world,
    why_unavailable,
)
from collectives.registry.by_device import ProcessGroupByDevice
from collectives.store import PrefixStore
from collectives.store.joining.world_rendezvous import KEYS, forget_joining, meet_world
from collectives.time_limits import time_limit
from collectives.torch_bridge import operators, register_backend
from collectives.torch_bridge.group import TorchGroup
from collectives.torch_bridge.hooks import recorder_wanted
from collectives.torch_bridge.several_tensors import taken_apart
from collectives.torch_bridge.work import TorchWork

__all__ = ["register_world_with_torch"]

_VARIABLE = "TORCH_DIST_NAN_CHECK"


def nan_check_wanted() -> bool:
    """Returns whether the environment asks for the check; groups ask when they are made, as torch does."""
    return os.environ.get(_VARIABLE) == "1"


@leave_uncompiled
class NanCheckedGroup(TorchGroup):
    """Raises where a tensor that this rank is to send holds a NaN, before anything is sent.

    The other ranks wait for this one as for one that does not come. What is only received is not looked at.
    On CUDA devices each look waits for the device.

    Raises:
        DistError: from the operation; names the element.
    """

    # All operations pass where tensors are looked at.

    def _fast_collective(self, *args: Any, **kwargs: Any) -> TorchWork | None:  # noqa: ARG002
        return None

    def _fast_message(self, *args: Any, **kwargs: Any) -> TorchWork | None:  # noqa: ARG002
        return None

    def _issue(
        self, event: str, tensors: Any, method: Callable[..., Work], /, *args: Any, **kwargs: Any
    ) -> TorchWork:
        def checked(*args: Any, **kwargs: Any) -> Work:
            for tensor in self._sent(event, tensors, args, kwargs):
                where = _first_nan(tensor)
                if where is not None:
                    raise DistError(
                        f"[rank {self.rank()}] {event} on {self!r}: the tensor of {tensor.dtype} "
                        f"{list(tensor.shape)} to be sent is NaN at element {where}; nothing was sent "
                        f"({_VARIABLE}=1)"
                    )
            return method(*args, **kwargs)

        return super()._issue(event, tensors, checked, *args, **kwargs)

    def _sent(
        self, event: str, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[torch.Tensor]:
        """Yields the tensors that an operation sends."""
        if event in {"recv", "recvAnySource"}:
            return
        if event == "broadcast" and taken_apart(BROADCAST, args, kwargs)[2]["root"] != self.rank():
            return
        yield from profiling.flat([args[1] or () if event == "scatter" else tensors])


def _first_nan(tensor: torch.Tensor) -> int | None:
    """Returns the number of the first element that is NaN, of a sparse tensor among those that it has."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.is_sparse else values.values()
    if not (values.is_floating_point() or values.is_complex()) or not values.numel():
        return None
    if values.dtype.itemsize == 1:
        values = values.float()  # the small formats have no comparison of their own
    found = torch.isnan(values).reshape(-1)
    return int(found.int().argmax()) if bool(found.any()) else None


_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class GroupThatExists:
    """Given to torch as a backend's options: the group that carries out the new one.

    Attributes:
        group: the group; its owner ends it, not torch.
    """

    group: ProcessGroup


@leave_uncompiled
def create(
    name: str, backend: str, options: Any, pg_options: Any, fixed: Mapping[str, Any] = _NOTHING
) -> TorchGroup:
    """Returns a group for torch; called by all its members, blocks until all have come.

    A ``ProcessGroup`` of Python serves Python callers without a way through C++. What C++ looks up beside it
    is a ``Backend`` of Python where torch lets us make one, and our kernels where not.

    Args:
        name: name of the backend in torch.
        backend: its name in the registry.
        options: torch's record of store, rank, size, time limit and names.
        pg_options: options of the backend itself; a dict by backend where CUDA tensors have another. A
            :class:`GroupThatExists` has none made.
        fixed: fields of those options that the name stands for.

    Raises:
        ValueError: ``pg_options`` say something else than the name; or members disagree about the backend or
            their number, or two of them claim one rank.
        DistStoreError: members did not come in time; names them.
    """
    rank, size, store = options.group_rank, options.group_size, options.store
    members = tuple(options.global_ranks_in_group) or tuple(range(size))
    existing = pg_options.group if isinstance(pg_options, GroupThatExists) else None
    # torch's way to say that the group gets its members later; what cannot do that is not to look at it.
    unformed = getattr(options, "enable_reconfigure", False) and backend_spec(backend).reconfigures
    if existing is None and unformed:
        store = PrefixStore(KEYS, store)
        pg_options = _with_fixed(pg_options, fixed, f"[rank {rank}] backend {name!r}")
    elif existing is None:
        # Records of a group prove nothing in another one, which may form at once.
        group = f"{backend} group {options.group_id}"
        base = PrefixStore(KEYS, store, scope=f"{group} of {options.global_ranks_in_group}")
        _, store = meet_world(base, rank, size, backend, time_limit(options.timeout), what=group)
        forget_joining(base, size)
        pg_options = _with_fixed(pg_options, fixed, f"[rank {rank}] backend {name!r}")
    # Newer versions hand on torch's own group, which this one stands for; others bind this one later.
    replaced = getattr(options, "process_group", None)
    about = GroupOptions(
        store=store,
        rank=rank,
        size=size,
        timeout=options.timeout,
        group_name=options.group_id,
        global_ranks=members,
        device_id=None if replaced is None else replaced.bound_device_id,
        pg_options=None if existing is not None else pg_options,
        unformed=bool(unformed) and existing is None,
    )
    return _group(name, backend, about, existing, bool(options.global_ranks_in_group))


def create_independent(
    name: str,
    backend: str,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    device: torch.device,  # noqa: ARG001 - as torch has it
    pg_options: Any = None,
    fixed: Mapping[str, Any] = _NOTHING,
) -> TorchGroup:
    """Returns a group for torch that is in no world; called by all its ranks, blocks until all have come.

    Args:
        name: see :func:`create`.
        backend: see :func:`create`.
        store: a store that all ranks reach, of several such groups one after the other.
        rank: this process's rank.
        size: number of ranks.
        timeout: time limit for ranks to come and of operations.
        device: device of the tensors.
        pg_options: see :func:`create`.
        fixed: see :func:`create`.
    """
    about = meet_outside_world(store, rank, size, backend, time_limit(timeout), f"{backend} group")
    about.pg_options = _with_fixed(pg_options, fixed, f"[rank {rank}] backend {name!r}")
    return _group(name, backend, about)


def _group(
    name: str,
    backend: str,
    about: GroupOptions,
    existing: ProcessGroup | None = None,
    is_part: bool = False,
) -> TorchGroup:
    """Returns a group for torch, around the existing one or a new one; arguments as for :func:`create`."""
    if existing is None:
        # torch's level is set apart from ours; its own comparing wrapper is not made for groups of Python
        detail = c10d.get_debug_level() == c10d.DebugLevel.DETAIL
        inner = checked(_make(backend, about), detail=detail)
    else:
        inner = existing
    kind = NanCheckedGroup if nan_check_wanted() else TorchGroup
    if operators.can_be_made():
        group = kind(inner, name, about.group_name)
        operators.attach(group)
    else:
        group = kind(inner, name, about.group_name, operators.acquire, operators.release)
    group.owns_inner = existing is None
    inner._is_part = inner._is_part or is_part
    if about.device_id is not None:
        group.bound_device_id = about.device_id
    group.make_part = partial(_part, name, backend, about)
    if recorder_wanted():
        group.record_for_torch()
    return group


def _part(
    name: str,
    backend: str,
    parent: GroupOptions,
    group: TorchGroup,
    ranks: Sequence[int],
    timeout: timedelta | None,
    options: Any,
    group_name: str,
) -> TorchGroup | None:
    """Returns a group of some ranks of a group; arguments as of ``TorchGroup.split_group``.

    Args:
        name: name of the backend in torch.
        backend: its name in the registry.
        parent: what the group was made of.
        group: the group.
        ranks: the members' ranks there.
        timeout: time limit of the part's operations; ``None`` for the group's.
        options: options of the backend itself; torch's general ones and ``None`` stand for the group's.
        group_name: name of the part, the same on all members.
    """
    if group.rank() not in ranks:
        group.inner._decline_split()
        return None
    about = dataclasses.replace(
        parent,
        store=PrefixStore(group_name, group.inner.get_group_store()),
        rank=list(ranks).index(group.rank()),
        size=len(ranks),
        timeout=group.inner.timeout if timeout is None else timeout,
        group_name=group_name,
        global_ranks=tuple(group.inner.global_ranks[rank] for rank in ranks),
        device_id=group.bound_device_id,
        pg_options=parent.pg_options if options is None or is_general(options) else options,
        split_from=group.inner._unchecked,
        unformed=False,
    )
    return _group(name, backend, about, is_part=True)


def _make(backend: str, options: GroupOptions) -> ProcessGroup:
    """Makes a group of a backend; of ``host`` with a part for CUDA tensors, where this machine can have one.

    One that gets its members later has none, since NCCL's groups cannot change theirs.

    That part is NCCL's, and makes its connections when first used: who stays on the CPU pays for the import
    of NCCL's provider only.
    """
    if (
        backend != "host"
        or options.unformed
        or not torch.cuda.is_available()
        or why_unavailable("nccl") is not None
    ):
        return create_group(backend, options)
    split_from = getattr(options.split_from, "groups", {})
    given = options.pg_options
    chosen = given if isinstance(given, Mapping) else {_backend_of(given): given}
    parts = {
        device: create_group(
            name,
            dataclasses.replace(
                options,
                store=PrefixStore(name, options.store),
                pg_options=chosen.get(name),
                split_from=split_from.get(device),
            ),
        )
        for device, name in (("cpu", "host"), ("cuda", "nccl"))
    }
    return ProcessGroupByDevice(parts, options.store)


def _backend_of(options: object) -> str:
    """Returns the backend whose options these are, of ``host`` and what stands beside it."""
    return options._backend if isinstance(options, BackendOptions) else "host"


def _with_fixed(given: Any, fixed: Mapping[str, Any], who: str) -> Any:
    """Returns the options of a backend whose name stands for some of their fields."""
    if not fixed:
        return given
    fields = {} if given is None else given
    for field, value in fixed.items():
        said = fields.get(field, value) if isinstance(fields, Mapping) else getattr(fields, field, value)
        if said != value:
            raise ValueError(f"{who}: its name says {field}={value}, but pg_options say {field}={said!r}")
    return {**fields, **fixed} if isinstance(fields, Mapping) else given


def register_world_with_torch() -> None:
    """Makes the default group that of ``torch.distributed`` as well; called by all ranks, does not block.

    Programs that look for the ranks in ``torch.distributed`` then find them: torchmetrics, distributed
    checkpoints, samplers, device meshes. Both layers use the same group, so that their calls count as one
    sequence, and ``torch.distributed.new_group`` makes groups on the same store. A second call does nothing.

    :func:`collectives.destroy_process_group` ends both worlds; ``torch.distributed.destroy_process_group``
    ends the groups of ``torch.distributed.new_group`` and leaves this one usable. After
    :func:`collectives.shrink_group` of the default group, end torch's world in this way and call this again.

    Raises:
        ValueError: there is no default group here, or another one in ``torch.distributed``, or several
            backends other than ``host`` and ``nccl`` make it up.

    Example:
        In a script that ``torchrun`` starts::

            collectives.init_process_group("host")
            collectives.register_world_with_torch()
            assert torch.distributed.get_rank() == collectives.get_rank()
            collectives.destroy_process_group()
    """
    with world.lock:
        default = default_group()
        world.refuse_in_child("register_world_with_torch")
        if torch.distributed.is_initialized():
            if group_behind(torch.distributed.group.WORLD) is default:
                return
            raise ValueError(
                f"[rank {default.rank()}] register_world_with_torch: torch.distributed has a default group "
                f"already ({torch.distributed.get_backend()}); end that by "
                "torch.distributed.destroy_process_group() first"
            )
        torch.distributed.init_process_group(
            _name_in_torch(default.rank(), group_record(default).config.names()),
            store=PrefixStore(f"torch/{local_turn('world of torch')}", world.store),
            rank=default.rank(),
            world_size=default.size(),
            timeout=default.timeout,
            pg_options=GroupThatExists(default),
            device_id=world.device if world.device is not None and world.device.type == "cuda" else None,
        )
        world.known_to_torch = True


def _name_in_torch(rank: int, backends: list[str]) -> str:
    """Returns the name of a world's backend in torch, which then knows it, for groups made there later."""
    if set(backends) <= {"host", "nccl"}:
        return "collectives"
    if len(set(backends)) > 1:
        raise ValueError(
            f"[rank {rank}] register_world_with_torch: torch has no name for the backend {get_backend()!r}; "
            'those of one kind are taken, and "cpu:host,cuda:nccl"'
        )
    name = f"collectives_{backends[0]}"
    if not torch.distributed.is_backend_available(name):
        register_backend(name, backends[0], backend_spec(backends[0]).devices)
    return name
