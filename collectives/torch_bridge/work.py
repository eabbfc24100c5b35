"""Our Work in the form that torch's Python and C++ callers expect.

Around a Work that a Python method returns to C++, torch makes a holder: a C++ object that keeps the Python
object alive and forwards ``wait`` and ``get_future`` to it, nothing else. Python callers of a group get the
Work itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as torch_dist
from torch.futures import Future

from collectives.core.work import CompletedWork, Forwarding, Work
from collectives.errors import DistError
from collectives.time_limits import seconds_to_wait

if TYPE_CHECKING:

    class _Work:
        """``torch.distributed.Work`` without the signatures that its stub gets wrong."""

    class _Group:
        """``torch.distributed.ProcessGroup`` with the constructor that subclasses can call."""

        bound_device_id: torch.device | None

        def __init__(self, rank: int, size: int) -> None: ...

        def rank(self) -> int: ...
else:
    _Work = torch_dist.Work
    _Group = torch_dist.ProcessGroup


class TorchWork(Forwarding, _Work):
    """A ``torch.distributed.Work`` around one of ours.

    Args:
        inner: the operation.
    """

    __slots__ = ("inner",)

    def __init__(self, inner: Work) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the operation is done; see :meth:`collectives.Work.wait`."""
        try:
            return self.inner.wait(timeout)
        except DistError:
            raise
        except BaseException:  # of a signal handler: torch's recv is irecv and this
            self.inner._rest()
            raise

    def synchronize(self) -> None:
        """Same as :meth:`wait` without a limit."""
        self.inner.synchronize()

    def is_success(self) -> bool:
        """Returns whether the operation is done without an error; never blocks."""
        return self.inner.is_success()

    def _source_rank(self) -> int:
        return self.inner.source_rank()

    def get_future_result(self) -> Future[int]:
        """Returns a future of a ``WorkResult`` number that never carries an error."""
        return self.inner.get_future_result()

    def boxed(self) -> Any:
        """Returns this Work for C++, which keeps all of it alive; ``Work.unbox`` gives a Work again."""
        return hold_for_cpp(self).boxed()


_making = threading.RLock()
"""Held while a Work that was done makes what several threads may ask for."""


class DoneWork(TorchWork):
    """An operation that was done when its call returned; quicker to make than a Work around one of ours.

    Synchronous calls return one, as torch's C++ code does not survive ``None``. Few callers ask for more than
    :meth:`wait`.
    """

    __slots__ = ("_inner", "outputs")

    __init__ = _Work.__init__

    outputs: torch.Tensor | Sequence[torch.Tensor]
    """The output tensors; set by the creator."""
    _inner: TorchWork

    def _full_work(self) -> TorchWork:
        """Returns the Work, for rarely used methods."""
        try:
            return self._inner
        except AttributeError:
            outputs = self.outputs
            made = TorchWork(CompletedWork((outputs,) if isinstance(outputs, torch.Tensor) else outputs))
            with _making:
                if not hasattr(self, "_inner"):
                    self._inner = made
            return self._inner

    @property
    def inner(self) -> Work:  # type: ignore[override]
        """The operation as a Work of ours."""
        return self._full_work().inner

    def get_future(self) -> Future[Any]:
        """Returns a completed future of the list of output tensors; always the same one."""
        return self._full_work().get_future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns ``True`` at once."""
        if timeout is not None:
            seconds_to_wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Returns ``True``."""
        return True


class BatchedWork(TorchWork):
    """An operation issued inside a coalescing block: its ``wait`` is the block's.

    Callers inside the block wait for an operation before they issue the next, and peers may issue them in
    another order, so that waiting there would block for ever. The Work that ends the block waits for all of
    them.
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once; wait for the Work of the block instead."""
        if timeout is not None:
            seconds_to_wait(timeout)
        return True

    def synchronize(self) -> None:
        """Returns at once."""


class _Carrier(_Group):
    """Hands a Work from Python to C++ in a holder.

    The ``boxed()`` of torch's class does not keep the Python half of a Work alive: C++ callers would wait for
    ever once that is collected. What a group's method returns to C++ is put into a holder, so this group's
    ``barrier`` returns the Work.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._local = threading.local()

    def barrier(self, _opts: Any = None) -> TorchWork:
        """Returns the Work that :meth:`hold` was given on this thread."""
        work: TorchWork = self._local.work
        return work

    def hold(self, work: TorchWork) -> Any:
        """Returns the holder of ``work``, a ``torch.distributed.Work`` of C++."""
        self._local.work = work
        try:
            return torch_dist.ProcessGroup.barrier(self)  # type: ignore[call-overload]
        finally:
            del self._local.work


_carrier: _Carrier | None = None


def hold_for_cpp(work: TorchWork) -> Any:
    """Returns a C++ Work that keeps ``work`` alive and forwards to it."""
    global _carrier
    if _carrier is None:
        _carrier = _Carrier()
    return _carrier.hold(work)
