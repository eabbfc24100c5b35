"""Buffers of a module, kept equal to one rank's."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from collectives import ProcessGroup
from collectives.core.arguments.staging import repeats_elements
from collectives.ddp.sync.broadcast import FlatBroadcast

__all__ = ["BufferSync", "refuse_overlaps"]


class BufferSync:
    """Sends one rank's buffers to all, all in one message for each device; true where there are any.

    Buffers are looked up by name each time, so that a module may assign new tensors to them, of other shapes
    and data types, too, on all ranks alike.

    Args:
        module: the module.
        group: the ranks.
        ignored: names of buffers that are left alone.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, ignored: Collection[str]) -> None:
        self._group = group
        self._places: dict[torch.device, list[tuple[str, nn.Module, str]]] = {}
        self._messages: dict[torch.device, FlatBroadcast] = {}
        seen: set[int] = set()
        for prefix, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is None or name in ignored or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                self._places.setdefault(buffer.device, []).append((name, owner, key))

    def __bool__(self) -> bool:
        return bool(self._places)

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers by name."""
        return {
            name: buffer
            for places in self._places.values()
            for name, owner, key in places
            if (buffer := owner._buffers[key]) is not None
        }

    def __call__(self, root: int = 0) -> None:
        """Sends the buffers; called by all ranks. Blocks.

        Autograd sees nothing of it, as with torch: the backward pass of an earlier forward may still come.
        Where the buffers were equal, as all that training leaves alone, it finds the same values; the
        statistics of batch normalisation, which differ, it does not read.

        Args:
            root: rank that sends its own.
        """
        works = []
        for device, places in self._places.items():
            buffers = [_unseen(owner, key) for _, owner, key in places]
            message = self._messages.get(device)
            if message is None:
                message = self._messages[device] = FlatBroadcast(self._group)
            works.append((message, message.start(buffers, root, blocking=len(self._places) == 1), buffers))
        for message, work, buffers in works:
            message.finish(work, buffers, root)


def refuse_overlaps(tensors: Mapping[str, torch.Tensor], model: str) -> None:
    """Checks that each element has memory of its own, so that another rank's values can be written there.

    Args:
        tensors: parameters and buffers by name.
        model: the model in words.

    Raises:
        ValueError: elements share their memory, as after ``expand``.
    """
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and repeats_elements(tensor):
            raise ValueError(
                f"{name} of {model} has the shape {list(tensor.shape)} and the strides "
                f"{list(tensor.stride())}: elements share their memory, so that rank 0's values cannot be "
                "written there; register tensor.clone() instead of what expand() returned"
            )


def _unseen(owner: nn.Module, key: str) -> torch.Tensor:
    """Returns the memory of a buffer as a tensor whose changes autograd does not see."""
    buffer = owner._buffers[key]
    if buffer is None:
        raise RuntimeError(
            f"buffer {key} of {type(owner).__name__} was set to None after the module was wrapped"
        )
    return buffer.data
