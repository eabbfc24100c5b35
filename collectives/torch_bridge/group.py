"""A ``torch.distributed.ProcessGroup`` that is carried out by one of ours.

torch reaches a group in four ways, and all of them end here:

- Python functions (``torch.distributed.all_reduce``) call the methods of this class.
- C++ code (the gradient reducer, functional collectives) calls virtual methods, which torch forwards to those
  Python methods that it knows of. Which ones differs between torch versions, as do the names: all names of
  the table of operations are here.
- What C++ does not forward goes through the ``c10d::`` operators, as do direct calls of them. Their kernels
  are ours, or torch's, which call a ``Backend`` that hands on to the group
  (:mod:`collectives.torch_bridge.operators`).
- ``group._get_backend(device)`` gives the object that serves a device: this group itself.

No backend of torch's own is registered in the group, so that whatever should fall through all of these
raises, instead of answering without having communicated.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch._C import _distributed_c10d as c10d

from collectives.core import operations, profiling
from collectives.core.arguments.option_records import REDUCE_OP_CODES, GeneralOptions, time_limit_of
from collectives.core.arguments.staging import dense_outputs
from collectives.core.arguments.validation import overload_arguments
from collectives.core.operations import COALESCED, OPERATIONS, Coalesced, Operation
from collectives.core.process_group import ProcessGroup
from collectives.core.work import COMPLETED, CoalescedWork, Work
from collectives.dynamo import leave_uncompiled
from collectives.errors import (
    CollectiveTimeoutError,
    DistError,
    GroupAbortedError,
    PeerLostError,
    UnsupportedOperationError,
)
from collectives.registry.backends import why_unavailable
from collectives.torch_bridge import dispatch_modes, several_tensors
from collectives.torch_bridge.hooks import AROUND_OPERATIONS, HookedGroup
from collectives.torch_bridge.work import BatchedWork, DoneWork, TorchWork

_NO_LIMIT = timedelta(0)
"""The longest time in torch's records that stands for no limit of their own."""

_HAS_INDICES = hasattr(c10d.AllreduceOptions, "sparseIndices")  # since torch 2.15

_profiler: Any = torch.autograd.profiler

_RECORDS = {name.lower(): kind for name, kind in vars(c10d).items() if name.endswith("Options")}
"""torch's option records by their names, such as ``"allreduceoptions"``."""

_OTHER_NAMES: dict[Operation, dict[str, str]] = {
    operations.REDUCE_SCATTER: {"input_tensor": "input_tensors"},
    operations.ALL_TO_ALL: {"output_tensor": "output_tensors", "input_tensor": "input_tensors"},
    operations.ALL_TO_ALL_SINGLE: {"output_tensor": "output", "input_tensor": "input"},
}
"""Keywords of single versions of torch, and those of our methods."""


def _only(values: Any) -> Any:
    """Returns the entry of a list of one, as torch wraps tensors and lists; ``None`` for none at all.

    Ranks that are not the root give no list, or an empty one.
    """
    if type(values) is list:
        values = values[0] if len(values) == 1 else values or None
        if type(values) is list and not values:
            return None
    return values


def _wait_for_async_tensors(values: Any) -> tuple[Any, bool]:
    """Waits for results of torch's functional collectives for which nobody waited.

    An ``AsyncCollectiveTensor`` has no memory of its own. torch's operators wait for the tensor inside it and
    take that, but Python functions call a group of ours without going through an operator.

    Returns:
        The values with the tensors inside, which share the memory that is seen through the outer ones, and
        whether there were any.
    """
    functional = sys.modules.get("torch.distributed._functional_collectives")  # slow to load, and rarely used
    return (values, False) if functional is None else _wait_for(values, functional.AsyncCollectiveTensor)


def _wait_for(values: Any, kind: type[Any]) -> tuple[Any, bool]:
    if isinstance(values, kind):
        return values.trigger_wait(), True
    if type(values) not in (list, tuple):
        return values, False
    entries = [_wait_for(value, kind) for value in values]
    if not any(found for _, found in entries):
        return values, False
    return type(values)(value for value, _ in entries), True


class TorchGroup(HookedGroup):
    """One of our groups in the form of torch's.

    Methods have the names, overloads and meanings of ``torch.distributed.ProcessGroup`` and ``Backend``.
    Those of the operations are described in :class:`collectives.ProcessGroup`. Option records and reductions
    may be torch's or ours.

    Attributes:
        make_part: makes a group of some of the ranks; ``None`` where torch did not make this one.
        owns_inner: whether the end of this group is that of ``inner``.

    Args:
        inner: the group that communicates.
        backend_name: name under which torch knows the backend.
        name: name of the group in torch.
        begun: called when the group is made, and when it goes on with other members after its end.
        ended: called once after that, when the group was shut down, aborted or collected.
    """

    # What the object that serves a device offers beyond the operations.
    supports_splitting = True
    supports_time_estimate = False
    supports_shrinking = False
    supports_window = False

    def __init__(
        self,
        inner: ProcessGroup,
        backend_name: str,
        name: str,
        begun: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self._backend_name = backend_name
        self._torch_name = name
        self._torch_desc = inner.group_desc
        self.make_part: Callable[..., Any] | None = None
        self.owns_inner = True
        self._parts = itertools.count(1)
        self._issued = itertools.count(1)
        self._sequence = 0
        self._batches: dict[int, tuple[list[Work], ExitStack]] = {}
        self._aborted = False
        self._begin_without_hooks()
        self._life = begun, ended
        self._begin_life()

    def _begin_life(self) -> None:
        begun, ended = self._life
        begun()
        self._ended = weakref.finalize(self, ended)
        self._ended.atexit = False

    # ---- identity ------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Returns this process's rank within the group."""
        return self.inner.rank()

    def size(self) -> int:
        """Returns the number of ranks."""
        return self.inner.size()

    getRank, getSize = rank, size  # what C++ asks for, which would keep what they were at first

    def name(self) -> str:
        """Returns the name of the backend in torch."""
        return self._backend_name

    getBackendName = _get_backend_name = name

    def getGroupName(self) -> str:
        """Returns the name of the group, unique in the job."""
        return self._torch_name

    def setGroupName(self, name: str) -> None:
        """Sets the name of the group."""
        self._torch_name = name

    def getGroupDesc(self) -> str:
        """Returns the text that describes the group."""
        return self._torch_desc

    def setGroupDesc(self, desc: str) -> None:
        """Sets the text that describes the group."""
        self._torch_desc = desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName, doc="Name of the group, unique in the job.")
    group_desc = property(getGroupDesc, doc="Text that describes the group.")

    def get_group_store(self) -> Any:
        """Returns the store that the group was made with."""
        return self.inner.get_group_store()

    def __repr__(self) -> str:
        return f"<{self._backend_name} group {self._torch_name!r}: {self.inner!r}>"

    # ---- the object that serves a device -------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in sorted(self.inner.capabilities.devices)]

    def _get_backend(self, device: torch.device | str) -> TorchGroup:
        kind = torch.device(device).type
        if kind not in self.inner.capabilities.devices:
            # RuntimeError, because callers in torch ask with it whether a device is served
            raise RuntimeError(
                f"No backend type associated with device type {kind}: {self!r} serves "
                f"{', '.join(sorted(self.inner.capabilities.devices))}{why_not_served(kind)}"
            )
        return self

    get_backend = _get_backend

    @property
    def supports_coalescing(self) -> bool:
        """Whether a batch of sends and receives comes as a block, as NCCL needs it, and returns one Work."""
        return self.inner.needs_batches

    @property
    def options(self) -> Any:
        """A ``Backend.Options`` record of the group."""
        options = GeneralOptions(self._backend_name, self.inner.timeout)
        options.group_name = self._torch_name  # type: ignore[assignment]
        return options

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Binds the group to a device, where NCCL connects all ranks at once.

        Called by torch on all ranks of a group with a ``device_id``; may block until all have called.

        Args:
            device: the device, with an index.
        """
        self.inner._bind_device(device)
        self.bound_device_id = device

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,  # noqa: ARG002 - of one group for all of them
    ) -> Any:
        """Makes groups of some ranks each; called by all ranks, and blocks until those of the part have come.

        The part serves the same device types. Where the group is bound to a CUDA device, its connections are
        split off this group's.

        Args:
            ranks: ranks, within this group, of the part that this one joins, or of any where it joins none.
            timeout: time limit of the part's operations; ``None`` for that of this group.
            opts: options of the backend; ``None`` or torch's general record for those of this group.
            group_name: name of the part, not used before; ``None`` makes one.
            group_desc: free text, which messages show.
            device_types: not looked at.

        Returns:
            The part, ``None`` on a rank that is not in it.

        Raises:
            ValueError: ``ranks`` are not different ranks of this group.
        """
        number = next(self._parts)
        if self.make_part is None:
            self._refuse("split_group", "make sub-groups with torch.distributed.new_group")
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size())):
            raise ValueError(
                f"[rank {self.rank()}] split_group on {self!r}: ranks must be different ones from 0 to "
                f"{self.size() - 1}, but are {list(ranks)}"
            )
        name = group_name or f"{self._torch_name}:split{number}:{'_'.join(map(str, ranks))}"
        part = self.make_part(self, ranks, timeout, opts, name)
        if part is not None and group_desc is not None:
            part.setGroupDesc(group_desc)
        return part

    def supports_tensor_alloc(self, device: Any) -> bool:  # noqa: ARG002
        """Returns ``False``: tensors of any allocator are taken."""
        return False

    # ---- life ----------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of all future operations that name none."""
        self.inner.set_timeout(timeout)

    setTimeout = _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Breaks the group at once: waiting operations raise."""
        self._aborted = True
        self._tell_of_break()
        try:
            self.inner.abort()
        finally:
            self._ended()

    def shutdown(self) -> None:
        """Finishes the operations already issued, then frees the resources that are this group's own."""
        try:
            if self.owns_inner:
                self.inner.shutdown()
                self.inner._leave_place()
            self._wait_for_pending_works()
        finally:
            self._ended()

    # ---- other members -------------------------------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group can take other members, as over ``host``."""
        return self.inner.supports_reconfigure

    def get_reconfigure_handle(self) -> str:
        """Returns the text by which this process is named to :meth:`reconfigure`."""
        return self.inner.reconfigure_handle()

    def reconfigure(self, opts: Any) -> TorchWork:
        """Gives the group other members; see :meth:`collectives.ProcessGroup.reconfigure`. Blocks.

        Args:
            opts: torch's ``ReconfigureOptions``: ``uuid``, ``handles``, ``timeout``, and no ``hints``.

        Returns:
            Work that is done.

        Raises:
            ValueError: there are hints, or the handles are wrong.
            DistError: as there.
        """
        if opts.hints:
            raise ValueError(
                f"[rank {self.rank()}] reconfigure on {self!r} takes no hints, but got {dict(opts.hints)}"
            )
        self.inner.reconfigure(opts.uuid, opts.handles, opts.timeout)
        self._aborted = self._broken = False
        if not self._ended.alive:
            self._begin_life()
        self._set_sequence_number_for_group()
        self._parts = itertools.count(1)
        self._tell_torch()
        done: DoneWork = DoneWork()
        return done

    def _tell_torch(self) -> None:
        """Notes the new members where ``torch.distributed`` looks for them."""
        itself: Any = self
        known = torch.distributed.distributed_c10d._world.pg_group_ranks
        if itself is torch.distributed.group.WORLD:
            self.inner.set_global_ranks(range(self.size()))
        if itself in known:
            known[itself] = {rank: number for number, rank in enumerate(self.inner.global_ranks)}

    def failure(self) -> DistError | None:
        """Returns what broke the group, or ``None``; that, too, after this rank aborted it."""
        cause = self.inner._first_cause()
        return None if self._aborted and isinstance(cause, GroupAbortedError) else cause

    def get_error(self) -> Any:
        """Returns torch's ``ErrorType`` for what broke the group; ``SUCCESS`` after this rank aborted it."""
        kinds, cause = c10d.ErrorType, self.failure()
        if cause is None:
            return kinds.SUCCESS
        if isinstance(cause, CollectiveTimeoutError):
            return kinds.TIMEOUT
        remote = isinstance(cause, (PeerLostError, GroupAbortedError)) and cause.rank != self.rank()
        return kinds.REMOTE_ERROR if remote else kinds.COMM_ERROR

    def _get_sequence_number_for_group(self) -> int:
        """Returns how many operations this rank has issued; called by torch on one rank or all."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Starts to count operations anew; called by torch on all ranks after it has made a group."""
        self._issued = itertools.count(1)
        self._sequence = 0

    getSequenceNumberForGroup = _get_sequence_number_for_group
    setSequenceNumberForGroup = _set_sequence_number_for_group

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise UnsupportedOperationError(f"[rank {self.rank()}] {self!r} does not offer {what}; {instead}")

    # ---- issuing -------------------------------------------------------------------------------------------

    def _issue(
        self, event: str, tensors: Any, method: Callable[..., Work], /, *args: Any, **kwargs: Any
    ) -> TorchWork:
        """Issues an operation of the inner group.

        Args:
            event: name of the profiler event, without the backend.
            tensors: tensors whose shapes it records.
            method: method of the inner group, or what calls several of them.
            *args: its arguments.
            **kwargs: its keyword arguments.
        """
        work: Work | None
        try:
            if profiling.possible() and profiling.enabled():
                work = profiling.observed(
                    f"{self._backend_name}:{event}", tensors, lambda: method(*args, **kwargs)
                )
            else:
                work = method(*args, **kwargs)
        except TypeError:  # before any communication, as arguments are checked first
            args, waited = _wait_for_async_tensors(args)
            if not waited:
                raise
            work = None
        except UnsupportedOperationError as error:
            devices = {tensor.device.type for tensor in profiling.flat([tensors])}
            devices -= self.inner.capabilities.devices
            if devices:
                raise UnsupportedOperationError(f"{error}{why_not_served(devices.pop())}") from None
            raise
        if work is None:
            return self._issue(event, tensors, method, *args, **kwargs)
        try:
            self._sequence = next(self._issued)
            if self._batches:
                batch = self._batches.get(threading.get_ident())
                if batch is not None:
                    batch[0].append(work)
                    return BatchedWork(work)
            return TorchWork(work)
        except BaseException:  # of a signal handler
            work._rest()
            raise

    def _fast_collective(
        self, opts: Any, opcode: int, output: Any, input: Any, reduce_op: int | None, root: Any, lists: bool
    ) -> TorchWork | None:
        """Issues a collective by the fast path of the inner group.

        :meth:`_issue` converts torch's whole record into one of ours, which takes longer than a small
        operation.

        Args:
            opts: torch's option record.
            opcode: number of the collective, of :mod:`collectives.core.operations`.
            output: what is written, or read and written.
            input: what is only read.
            reduce_op: code of the reduction; ``None`` for one that has a factor.
            root: the root.
            lists: whether the larger operand is a list of one tensor for each rank.

        Returns:
            The Work; ``None`` with nothing done where :meth:`_issue` is to be called.
        """
        if reduce_op is None or self._batches or _profiler._is_profiler_enabled or opts.timeout > _NO_LIMIT:
            return None
        work = self.inner.fast_collective(opcode, output, input, reduce_op, root, lists, opts.asyncOp)
        if work is None:
            return None
        self._sequence = next(self._issued)
        if work is not COMPLETED:
            return TorchWork(work)
        done: DoneWork = DoneWork()
        done.outputs = () if output is None else output
        return done

    def _message(self, name: str, tensors: Any, peer: int | None, tag: int) -> TorchWork:
        """Issues a message, by the fast path of the inner group where that takes it."""
        where = () if peer is None else (peer,)
        if dispatch_modes.possible():
            done = dispatch_modes.issue_by_operator(self, name, tensors, *where, tag)
            if done:
                return done
        elif peer is not None and not (self._batches or _profiler._is_profiler_enabled):
            work = self._fast_message(name == "send", _only(tensors), peer, tag)
            if work is not None:
                return work
        event = "recvAnySource" if peer is None else name
        return self._issue(event, tensors, getattr(self.inner, name), _only(tensors), *where, tag)

    def _fast_message(self, sends: bool, tensor: Any, peer: int, tag: int) -> TorchWork | None:
        work = self.inner.fast_message(sends, tensor, peer, tag, True)
        if work is None:
            return None
        try:
            self._sequence = next(self._issued)
            return TorchWork(work)
        except BaseException:  # of a signal handler
            work._rest()
            raise

    # ---- batches -------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:  # noqa: ARG002
        self._drop_coalesced()  # of a block that an exception left
        together = ExitStack()
        together.enter_context(self.inner._together())
        self._batches[threading.get_ident()] = [], together

    def _end_coalescing(self, device: Any = None) -> TorchWork:  # noqa: ARG002
        batch = self._batches.pop(threading.get_ident(), None)
        if batch is None:
            raise RuntimeError(f"[rank {self.rank()}] {self!r}: no coalescing block is open on this thread")
        works, together = batch
        together.close()
        return TorchWork(CoalescedWork(works))

    def _drop_coalesced(self) -> None:
        """Drops what the group has deferred to the end of the open block, if there is one."""
        left_open = self._batches.pop(threading.get_ident(), None)
        if left_open is not None:
            left_open[1].__exit__(RuntimeError, RuntimeError("the block was left by an exception"), None)

    @contextmanager
    def batch(self) -> Iterator[list[TorchWork]]:
        """Starts the messages that this thread issues in a ``with`` block together, at its end.

        Yields:
            A list, which holds the Work of all of them after the block. An exception drops them.
        """
        whole: list[TorchWork] = []
        self._start_coalescing()
        try:
            yield whole
        except BaseException:
            self._drop_coalesced()
            raise
        whole.append(self._end_coalescing())

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # ---- operations beside those of the table --------------------------------------------------------------

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Gathers every rank's tensor on the root into one; ``output`` is not looked at on other ranks."""
        about = overload_arguments(operations.GATHER, opts)
        record = c10d.GatherOptions() if opts is None else opts
        if self.rank() != about["root"]:
            if self.hooked:
                return self.gather([], [input], record)  # type: ignore[attr-defined, no-any-return]
            return self._issue("gather", input, self.inner.call, operations.GATHER, None, input, **about)
        if output.numel() != input.numel() * self.size():
            raise ValueError(
                f"[rank {self.rank()}] gather_single on {self!r}: output has {output.numel()} elements, but "
                f"must have {input.numel()} for each of {self.size()} ranks"
            )
        outputs = dense_outputs([output])
        parts = list(outputs.stand_ins[0].view(self.size(), input.numel()).unbind())
        if self.hooked:  # torch's kernel finds no gather_single in a Backend of Python
            whole = self.gather([parts], [input], record)  # type: ignore[attr-defined]
            return TorchWork(outputs.finish(whole.inner, about.get("async_op", True)))

        def gather(input: torch.Tensor) -> Work:
            work = self.inner.call(operations.GATHER, parts, input, **about)
            return outputs.finish(work, about.get("async_op", True))

        return self._issue("gather", input, gather, input)

    gather_into_tensor = gather_single

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Barrier on the host that names the ranks which did not come; blocks."""
        self.inner.monitored_barrier(timeout, wait_all_ranks)

    def monitoredBarrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Same as :meth:`monitored_barrier`, with the time limit in a record."""
        self.inner.monitored_barrier(None if opts is None else time_limit_of(opts), wait_all_ranks)

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> TorchWork:
        """Sends a tensor to a rank."""
        return self._message("send", tensors, dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> TorchWork:
        """Receives a tensor from a rank."""
        return self._message("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        """Receives a tensor from whichever rank sends one with this tag."""
        return self._message("recv_anysource", tensors, None, tag)

    recvAnysource = recv_anysource


_HOOKS = "use torch.profiler, which records every operation"
_NOT_OFFERED = {
    "_enable_collectives_timing": _HOOKS,
    **({} if AROUND_OPERATIONS else dict.fromkeys(("register_pre_hook", "register_post_hook"), _HOOKS)),
    "shrink": "make a group of the ranks that are left with torch.distributed.new_group",
    "new_window": "use send and recv",
    "allocate_tensor": "make the tensor as any other",
    "merge_remote_group": "initialize again with all ranks",
    "mergeRemoteGroup": "initialize again with all ranks",
    "splitGroup": "call split_group from Python",  # C++ would get a group that communicates with nobody
}
"""Methods of torch's groups that raise here, and what to do instead."""


def _refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    """Returns a method that raises."""

    def method(self: TorchGroup, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG001 - as torch has it
        self._refuse(name, instead)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"Raises; {instead}."
    return method


def _option_record(operation: Operation) -> Any:
    """Returns torch's option record of a collective: its own, or that of the core's collective."""
    own, other = (f"{name.replace('_', '')}options" for name in (operation.name, operation.collective))
    return _RECORDS.get(own) or _RECORDS[other]


def _collective(operation: Operation) -> Callable[..., TorchWork]:
    """Returns the method of :class:`TorchGroup` for a collective."""
    name, event, opcode = operation.methods[0], operation.collective, operation.opcode
    kind, reduces, rooted = _option_record(operation), operation.reduces, operation.rooted
    operands = 0 if operation is operations.BARRIER else 1 if operation.in_place else 2
    two = operands == 2
    place = 4 if operation is operations.ALL_TO_ALL_SINGLE else operands
    lists = operation.lists
    is_plain = _IS_PLAIN.get(operation)
    unwraps = operation is not operations.ALL_TO_ALL
    shown = 0 if operation.in_place or operation is operations.SCATTER else 1
    others = _OTHER_NAMES.get(operation, {})

    def method(self: TorchGroup, *args: Any, **named: Any) -> TorchWork:
        if named and len(args) == place and "opts" in named:
            args = (*args, named.pop("opts"))
        if len(args) == place + 1 and type(args[place]) is kind:
            if dispatch_modes.possible() and (done := dispatch_modes.issue_by_operator(self, name, *args)):
                return done
            if is_plain is None or is_plain(args):
                opts = args[place]
                output = args[0] if operands else None
                if unwraps and type(output) is list:
                    output = _only(output)
                given = args[1] if two else None
                if unwraps and type(given) is list:
                    given = _only(given)
                work = self._fast_collective(
                    opts,
                    opcode,
                    output,
                    given,
                    REDUCE_OP_CODES.get(hash(opts.reduceOp)) if reduces else 0,
                    opts.rootRank if rooted else 0,
                    lists,
                )
                if work is not None:
                    return work
        elif self.hooked and (
            done := dispatch_modes.issue_in_other_form(self, operation.methods, args, named)
        ):
            return done
        for keyword in others.keys() & named.keys():
            named[others[keyword]] = named.pop(keyword)
        tensors = (args[shown] if shown < len(args) else [*named.values()]) if operands else ()
        inner = several_tensors.method_for(self.inner, operation, args, named) or getattr(self.inner, name)
        return self._issue(event, tensors, inner, *args, **named)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"See :meth:`collectives.ProcessGroup.{name}`."
    return method


_IS_PLAIN: dict[Operation, Callable[[tuple[Any, ...]], bool]] = {
    **({operations.ALL_REDUCE: lambda args: args[1].sparseIndices is None} if _HAS_INDICES else {}),
    operations.ALL_REDUCE_COALESCED: lambda args: False,  # noqa: ARG005
    operations.ALL_TO_ALL_SINGLE: lambda args: not (args[2] or args[3]),
    operations.BARRIER: lambda args: args[0].device is None or args[0].device.type == "cpu",
}
"""Tells of torch's form of a call whether it has nothing that the fast path does not know."""


def _coalesced(several: Coalesced) -> Callable[..., TorchWork]:
    """Returns the method of :class:`TorchGroup` for several collectives in one call."""
    name = several.methods[0]

    def method(self: TorchGroup, *args: Any, **named: Any) -> TorchWork:
        if dispatch_modes.possible() and not named:
            given = args if len(args) == 3 else (*args, None)
            if done := dispatch_modes.issue_by_operator(self, name, *given):
                return done
        tensors = args[1] if len(args) > 1 else [*named.values()]
        return self._issue(several.base.collective, tensors, getattr(self.inner, name), *args, **named)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"See :meth:`collectives.ProcessGroup.{name}`."
    return method


for _operation in OPERATIONS:
    if _operation.methods:
        _method = _collective(_operation)
        for _name in _operation.methods:
            setattr(TorchGroup, _name, _method)
for _several in COALESCED:
    _method = _coalesced(_several)
    for _name in _several.methods:
        setattr(TorchGroup, _name, _method)
for _name, _instead in _NOT_OFFERED.items():
    setattr(TorchGroup, _name, _refusal(_name, _instead))
leave_uncompiled(TorchGroup)


def why_not_served(device: str) -> str:
    """Returns the error text for a device that is not served."""
    if device != "cuda":
        return ""
    reason = why_unavailable("nccl")
    return "; CUDA tensors need the nccl backend" + (
        f", which cannot be used here: {reason}" if reason else ""
    )
