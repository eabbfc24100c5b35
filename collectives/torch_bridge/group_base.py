"""Base of the torch group: names, devices, timeouts, shutdown, and what it does not offer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NoReturn

import torch

from collectives.core.arguments.option_records import GeneralOptions
from collectives.core.process_group import ProcessGroup
from collectives.core.work import Work
from collectives.dynamo import leave_uncompiled
from collectives.errors import UnsupportedOperationError
from collectives.registry.backends import why_unavailable
from collectives.torch_bridge.work import _Group

__all__ = ["TorchGroupBase", "why_not_served"]


@leave_uncompiled
class TorchGroupBase(_Group):
    """The part of :class:`~collectives.torch_bridge.group.TorchGroup` that issues nothing.

    Attributes:
        make_part: makes a group of some of the ranks; ``None`` where torch did not make this one.
        owns_inner: whether the end of this group is that of ``inner``.

    Args:
        inner: the group that communicates.
        backend_name: name under which torch knows the backend.
        name: name of the group in torch.
        ended: called once, when the group was shut down, aborted or collected.
    """

    # What the object that serves a device offers beyond the operations.
    supports_splitting = True
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
        self.make_part: Callable[..., Any] | None = None
        self.owns_inner = True
        self._parts = itertools.count(1)
        self._issued = itertools.count(1)
        self._sequence = 0
        self._batches: dict[int, tuple[list[Work], ExitStack]] = {}
        self._ended = weakref.finalize(self, ended)
        self._ended.atexit = False

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

    def _get_backend(self, device: torch.device | str) -> TorchGroupBase:
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
        try:
            self.inner.abort()
        finally:
            self._ended()

    def shutdown(self) -> None:
        """Finishes the operations already issued, then frees the resources that are this group's own."""
        try:
            if self.owns_inner:
                self.inner.shutdown()
        finally:
            self._ended()

    def _get_sequence_number_for_group(self) -> int:
        """Returns how many operations this rank has issued; called by torch on one rank or all."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Starts to count operations anew; called by torch on all ranks after it has made a group."""
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

    def register_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises; operations of Python groups do not pass where torch calls such hooks."""
        self._refuse("register_pre_hook", "use torch.profiler, which records every operation")

    def register_post_hook(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises, as :meth:`register_pre_hook`."""
        self._refuse("register_post_hook", "use torch.profiler, which records every operation")

    def reconfigure(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises; a group keeps its ranks."""
        self._refuse("reconfigure", "initialize again with the ranks that are left")

    def get_reconfigure_handle(self) -> NoReturn:
        """Raises, as :meth:`reconfigure`."""
        self._refuse("get_reconfigure_handle", "initialize again with the ranks that are left")

    def shrink(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises; sub-groups of the ranks that are left are made by ``new_group``."""
        self._refuse("shrink", "make a group of the ranks that are left with torch.distributed.new_group")

    def new_window(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises; there is no one-sided communication."""
        self._refuse("new_window", "use send and recv")

    def allocate_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises; tensors of any allocator are taken."""
        self._refuse("allocate_tensor", "make the tensor as any other")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises; groups of a fixed set of ranks are made by ``init_process_group`` and ``new_group``."""
        self._refuse("merge_remote_group", "initialize again with all ranks")

    def splitGroup(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raises; for callers in C++, which would get a group that communicates with nobody."""
        self._refuse("splitGroup", "call split_group from Python")

    mergeRemoteGroup = merge_remote_group

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise UnsupportedOperationError(f"[rank {self.rank()}] {self!r} does not offer {what}; {instead}")


def why_not_served(device: str) -> str:
    """Returns the error text for a device that is not served."""
    if device != "cuda":
        return ""
    reason = why_unavailable("nccl")
    return "; CUDA tensors need the nccl backend" + (
        f", which cannot be used here: {reason}" if reason else ""
    )
