"""Streams, events and memory of the device that a group's tensors are on.

Inside: what a group needs of a device, the CUDA device, and calls of the CUDA runtime without the GIL. Not
here: NCCL itself (:mod:`collectives.backends.nccl.libnccl`).
"""

from __future__ import annotations

from collectives.backends.nccl.device.base import Device, Event, Stream
from collectives.backends.nccl.device.cuda import CudaDevice, why_no_cuda

__all__ = ["CudaDevice", "Device", "Event", "Stream", "why_no_cuda"]
