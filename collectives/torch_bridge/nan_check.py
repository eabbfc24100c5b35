"""Groups that refuse to send NaN, as ``TORCH_DIST_NAN_CHECK=1`` asks torch's own groups to.

torch looks at tensors in the kernels of its operators, where operations of Python's groups do not pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from collectives.core import profiling
from collectives.core.arguments.calls import overload_arguments
from collectives.core.operations import BROADCAST
from collectives.core.work import Work
from collectives.dynamo import leave_uncompiled
from collectives.errors import DistError
from collectives.torch_bridge.group import TorchGroup
from collectives.torch_bridge.work import TorchWork

__all__ = ["NanCheckedGroup", "wanted"]

_VARIABLE = "TORCH_DIST_NAN_CHECK"


def wanted() -> bool:
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
        if event == "broadcast":
            opts = args[1] if len(args) > 1 else kwargs.get("opts")
            root = overload_arguments(BROADCAST, opts, root=kwargs.get("root"))["root"]
            if root != self.rank():
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
