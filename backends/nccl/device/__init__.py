"""Streams, events and memory of the device that a group's tensors are on.

Inside: the CUDA device, the runtime's functions that the core calls for it, and whose turn it is to issue
operations. Not here: NCCL itself (:mod:`collectives.backends.nccl.libnccl`).
"""

from __future__ import annotations

from collectives.backends.nccl.device.cuda import CudaDevice, Event, Stream, why_no_cuda

__all__ = ["CudaDevice", "Event", "Stream", "why_no_cuda"]
