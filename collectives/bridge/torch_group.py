"""A ``torch.distributed.ProcessGroup`` that is carried out by one of ours.

torch reaches a group on four ways, and all of them end here:

- Python functions (``torch.distributed.all_reduce``) call the methods of this class.
- C++ code (the gradient reducer, functional collectives) calls virtual methods, which torch forwards to those
  Python methods that it knows of. Which ones differs between torch versions, as do the names: both name
  families are here.
- What C++ does not forward goes through the ``c10d::`` operators, as do direct calls of them. Their kernels
  are ours (:mod:`collectives.bridge.kernels`), or torch's, which call a ``Backend`` that hands on to the
  group (:mod:`collectives.bridge.torch_backend`).
- ``group._get_backend(device)`` gives the object that serves a device: this group itself.

No backend of torch's own is registered in the group, so that whatever should fall through all of these
raises, instead of answering without having communicated.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch._C import _distributed_c10d as c10d

from collectives.bridge import profiling
from collectives.bridge.records import record
from collectives.bridge.torch_work import BatchedWork, TorchWork, _Group
from collectives.errors import UnsupportedOperationError
from collectives.process_group import ProcessGroup
from collectives.staging import dense_outputs
from collectives.types import GatherOptions
from collectives.work import CoalescedWork, Work

__all__ = ["TorchGroup"]


class TorchGroup(_Group):
    """One of our groups in the form of torch's.

    Methods have the names, forms and meanings of ``torch.distributed.ProcessGroup``; those of the operations
    are described in :class:`collectives.ProcessGroup`. Option records and reductions may be torch's or ours.

    Args:
        inner: the group that communicates.
        backend_name: name under which torch knows the backend.
        name: name of the group in torch.
        ended: called once, when the group was shut down, aborted or collected.
    """

    # What the object that serves a device offers beyond the operations.
    supports_splitting = False
    supports_coalescing = False  # so that a batch of sends and receives returns a Work for each
    supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def __init__(
        self, inner: ProcessGroup, backend_name: str, name: str, ended: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self._backend_name = backend_name
        self._torch_name = name
        self._torch_desc = inner.group_desc
        self._issued = itertools.count(1)
        self._sequence = 0
        self._ended = weakref.finalize(self, ended)
        self._ended.atexit = False
        self._batches: dict[int, list[Work]] = {}

    # ---- identity ------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Returns this process's rank within the group."""
        return self.inner.rank()

    def size(self) -> int:
        """Returns the number of ranks."""
        return self.inner.size()

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
                f"{', '.join(sorted(self.inner.capabilities.devices))}{_missing(kind)}"
            )
        return self

    get_backend = _get_backend

    @property
    def options(self) -> Any:
        """A ``Backend.Options`` record of the group."""
        options = c10d.Backend.Options(self._backend_name, self.inner.timeout)
        options.group_name = self._torch_name  # type: ignore[assignment]
        return options

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
        self.inner.abort()
        self._ended()

    def shutdown(self) -> None:
        """Finishes the operations already issued, then frees the group's resources."""
        try:
            self.inner.shutdown()
        finally:
            self._ended()

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        self._issued = itertools.count(1)
        self._sequence = 0

    getSequenceNumberForGroup = _get_sequence_number_for_group
    setSequenceNumberForGroup = _set_sequence_number_for_group

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Returns at once: torch asks for it where completion hooks are registered, and none can be."""

    def _register_on_completion_hook(self, hook: Any) -> NoReturn:  # noqa: ARG002
        self._refuse("_register_on_completion_hook", "use Work.get_future().then(...) of each operation")

    def _enable_collectives_timing(self) -> NoReturn:
        self._refuse("_enable_collectives_timing", "use torch.profiler, which records every operation")

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises; ``torch.distributed.new_group`` makes sub-groups."""
        self._refuse("split_group", "make sub-groups with torch.distributed.new_group")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises; groups of a fixed set of ranks are made by ``init_process_group`` and ``new_group``."""
        self._refuse("merge_remote_group", "initialize again with all ranks")

    splitGroup = split_group
    mergeRemoteGroup = merge_remote_group

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise UnsupportedOperationError(f"[rank {self.rank()}] {self!r} does not offer {what}; {instead}")

    # ---- issuing -------------------------------------------------------------------------------------------

    def _issue(
        self, event: str, shown: Any, method: Callable[..., Work], *args: Any, **kwargs: Any
    ) -> TorchWork:
        """Issues an operation of the inner group.

        Args:
            event: name of the profiler event, without the backend.
            shown: tensors whose shapes the event shows.
            method: method of the inner group.
            *args: its arguments; torch's option records among them are converted.
            **kwargs: its keyword arguments.
        """
        try:
            if profiling.enabled():
                background = all(getattr(arg, "asyncOp", True) for arg in args)
                work = profiling.observed(
                    f"{self._backend_name}:{event}", [shown], background, lambda: method(*args, **kwargs)
                )
            else:
                work = method(*args, **kwargs)
        except UnsupportedOperationError as error:
            kinds = {
                tensor.device.type for tensor in profiling.flat([shown])
            } - self.inner.capabilities.devices
            if kinds:
                raise UnsupportedOperationError(f"{error}{_missing(kinds.pop())}") from None
            raise
        self._sequence = next(self._issued)
        if self._batches:
            batch = self._batches.get(threading.get_ident())
            if batch is not None:
                batch.append(work)
                return BatchedWork(work)
        return TorchWork(work)

    def _start_coalescing(self, device: Any = None) -> None:  # noqa: ARG002
        # a block that an exception left open is forgotten; its operations run on
        self._batches[threading.get_ident()] = []

    def _end_coalescing(self, device: Any = None) -> TorchWork:  # noqa: ARG002
        works = self._batches.pop(threading.get_ident(), None)
        if works is None:
            raise RuntimeError(f"[rank {self.rank()}] {self!r}: no coalescing block is open on this thread")
        return TorchWork(CoalescedWork(works))

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # ---- collectives ---------------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> TorchWork:
        """Reduces a tensor over all ranks, in place."""
        call = self.inner.allreduce
        return self._issue("all_reduce", tensors, call, tensors, record(opts), timeout, op=op)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> TorchWork:
        """Reduces several tensors over all ranks, in place."""
        return self._issue("all_reduce", tensors, self.inner.allreduce_coalesced, tensors, record(opts))

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> TorchWork:
        """Copies the root's tensor to all ranks, in place."""
        call = self.inner.broadcast
        return self._issue("broadcast", tensors, call, tensors, record(opts), timeout, root=root)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Reduces a tensor over all ranks to the root, in place there."""
        call = self.inner.reduce
        return self._issue("reduce", tensors, call, tensors, record(opts), op, timeout, root=root)

    def allgather(
        self,
        output_tensors: Any,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        input_tensor: torch.Tensor | None = None,
    ) -> TorchWork:
        """Gathers every rank's tensor on all ranks."""
        source = input_tensor if input_tensors is None else input_tensors
        call = self.inner.allgather
        return self._issue("all_gather", source, call, output_tensors, source, *_with_limit(opts, timeout))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Gathers every rank's tensor into one, in rank order."""
        call = self.inner.all_gather_single
        return self._issue("all_gather", input, call, output, input, *_with_limit(opts, timeout))

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> TorchWork:
        """Gathers several tensors: ``output_lists[r][i]`` is what rank r gave as ``input_list[i]``."""
        for r, outputs in enumerate(output_lists):
            if len(outputs) != len(input_list):
                raise ValueError(
                    f"[rank {self.rank()}] all_gather_coalesced on {self!r}: output list {r} holds "
                    f"{len(outputs)} tensors, but {len(input_list)} inputs were given"
                )
        by_input = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        call = self.inner.allgather_coalesced
        return self._issue("all_gather", input_list, call, by_input, input_list, record(opts))

    def all_gather_single_coalesced(
        self, output_lists: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Gathers several tensors, each into one."""
        call = self.inner.all_gather_single_coalesced
        return self._issue("all_gather", input_list, call, output_lists, input_list, record(opts))

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        input_tensor: torch.Tensor | None = None,
    ) -> TorchWork:
        """Gathers every rank's tensor on the root."""
        source = input_tensor if input_tensors is None else input_tensors
        call = self.inner.gather
        return self._issue("gather", source, call, output_tensors, source, record(opts), timeout, root=root)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Gathers every rank's tensor on the root into one; ``output`` is not looked at on other ranks."""
        options = record(opts) or GatherOptions()
        if self.rank() != options.rootRank:
            return self._issue("gather", input, self.inner.gather, None, input, options)
        if output.numel() != input.numel() * self.size():
            raise ValueError(
                f"[rank {self.rank()}] gather_single on {self!r}: output has {output.numel()} elements, but "
                f"must have {input.numel()} for each of {self.size()} ranks"
            )
        outputs = dense_outputs([output])
        parts = list(outputs.stand_ins[0].view(self.size(), input.numel()).unbind())

        def gather(options: GatherOptions) -> Work:
            return outputs.finish(self.inner.gather(parts, input, options))

        return self._issue("gather", input, gather, options)

    def scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        output_tensor: torch.Tensor | None = None,
    ) -> TorchWork:
        """Gives each rank one tensor of the root's list."""
        target = output_tensor if output_tensors is None else output_tensors
        call = self.inner.scatter
        return self._issue("scatter", target, call, target, input_tensors, record(opts), timeout, root=root)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        input_tensor: Sequence[torch.Tensor] | None = None,
    ) -> TorchWork:
        """Reduces a list of tensors over all ranks; rank r keeps entry r."""
        source = input_tensor if input_tensors is None else input_tensors
        call = self.inner.reduce_scatter
        return self._issue(
            "reduce_scatter", source, call, output_tensors, source, record(opts), timeout, op=op
        )

    def reduce_scatter_single(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None
    ) -> TorchWork:
        """Reduces a tensor over all ranks; rank r keeps part r of equal parts."""
        call = self.inner.reduce_scatter_single
        return self._issue("reduce_scatter", inputTensor, call, outputTensor, inputTensor, record(opts))

    def reduce_scatter_single_coalesced(
        self,
        outputTensors: Sequence[torch.Tensor],
        inputTensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> TorchWork:
        """Reduces and scatters several tensors, as :meth:`reduce_scatter_single` each."""
        call = self.inner.reduce_scatter_single_coalesced
        return self._issue("reduce_scatter", inputTensors, call, outputTensors, inputTensors, record(opts))

    def alltoall(
        self, output_tensor: Any, input_tensor: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Sends entry r of the inputs to rank r and receives entry r of the outputs from it."""
        call = self.inner.alltoall
        return self._issue(
            "all_to_all", input_tensor, call, output_tensor, input_tensor, *_with_limit(opts, timeout)
        )

    def all_to_all_single(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends part r of a tensor to rank r and concatenates what the ranks send here."""
        splits = output_split_sizes, input_split_sizes
        call = self.inner.alltoall_base
        options = _with_limit(opts, timeout)
        return self._issue("all_to_all", input_tensor, call, output_tensor, input_tensor, *splits, *options)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        """Completes when every rank has called it."""
        return self._issue("barrier", (), self.inner.barrier, *_with_limit(opts, timeout))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Barrier on the host that names the ranks which did not come; blocks."""
        self.inner.monitored_barrier(timeout, wait_all_ranks)

    def monitoredBarrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Same as :meth:`monitored_barrier`, with the time limit in a record."""
        self.inner.monitored_barrier(None if opts is None else record(opts).timeout, wait_all_ranks)

    # ---- point-to-point ------------------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> TorchWork:
        """Sends a tensor to a rank."""
        return self._issue("send", tensors, self.inner.send, tensors, dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> TorchWork:
        """Receives a tensor from a rank."""
        return self._issue("recv", tensors, self.inner.recv, tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        """Receives a tensor from whichever rank sends one with this tag."""
        return self._issue("recvAnySource", tensors, self.inner.recv_anysource, tensors, tag)

    # ---- second names --------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    gather_into_tensor = gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    recvAnysource = recv_anysource


def _with_limit(opts: Any, timeout: timedelta | None) -> tuple[Any, timedelta | None]:
    """Returns option record and time limit; the third argument of some overloads is the limit itself."""
    if isinstance(opts, timedelta):
        return None, opts
    return record(opts), timeout


def _missing(kind: str) -> str:
    """Returns what to say about tensors on a device that is not served."""
    if kind != "cuda":
        return ""
    return "; CUDA tensors need the nccl backend, which is not part of this version: move them to the CPU"
