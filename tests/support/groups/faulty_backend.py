"""A backend of torch, ``faulty``, whose all-reduce misbehaves in a way of its own for each data type."""

from __future__ import annotations

import os
import time

import torch

from collectives.backends.host import ProcessGroupHost
from collectives.core.operations import ALL_REDUCE
from collectives.registry.backends import BackendSpec, GroupOptions, register_backend_spec
from collectives.torch_bridge import register_backend


class Faulty(ProcessGroupHost):
    """Wrong for float64, hangs for int32, dies for int64, loses its device for uint8; refuses int16.

    Raises on one rank for int8.
    """

    def __init__(self, options: GroupOptions) -> None:
        super().__init__(options.store, options.rank, options.size, options.timeout)
        self.fast_collective = lambda *_, **__: None

    def issue(self, call):
        if call.operation is not ALL_REDUCE:
            return super().issue(call)
        tensor = call.output
        if tensor.dtype is torch.int32 and self.rank() == 1:
            time.sleep(60)
        if tensor.dtype is torch.int64 and self.rank() == 1:
            os._exit(3)
        if tensor.dtype is torch.int8 and self.rank() == 1:
            raise RuntimeError("not today")
        if tensor.dtype is torch.int16:
            raise RuntimeError("never")
        if tensor.dtype is torch.uint8:
            raise torch.AcceleratorError("an illegal memory access was encountered")
        work = super().issue(call)
        if tensor.dtype is torch.float64:
            work.wait()
            tensor += 1
        return work


register_backend_spec(BackendSpec("faulty", ("cpu",), Faulty))
register_backend("faulty", "faulty")
