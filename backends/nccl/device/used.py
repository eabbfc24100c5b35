"""The devices that a group has used."""

from __future__ import annotations

import torch

from collectives.backends.nccl.device.cuda import CudaDevice

__all__ = ["UsedDevices"]


class UsedDevices(dict[torch.device, CudaDevice]):
    """The devices that a group has used, in order; what is asked for is used.

    Attributes:
        bound: the only one, of a group that is bound to a device.

    Args:
        kind: kind of the devices.
        where: rank and group, to stand in front of a message.
    """

    def __init__(self, kind: type[CudaDevice], where: str) -> None:
        super().__init__()
        self._kind = kind
        self._where = where
        self.bound: CudaDevice | None = None

    def __missing__(self, device: torch.device) -> CudaDevice:
        found = self._kind.shared(device)
        if self.bound is not None and found is not self.bound:
            raise ValueError(
                f"{self._where} an operation on {device}, but the group is bound to {self.bound.device} by "
                "its device_id; move the tensors there, or make the group without device_id"
            )
        return self.setdefault(device, found)

    def for_barrier(self, named: torch.device | int | None, rank: int) -> CudaDevice:
        """Returns the device that the user names, the one bound to, the first one used, or that of the rank.

        Args:
            named: what the user names: a device, or its number.
            rank: this process's rank in the world.
        """
        if isinstance(named, int):
            return self[torch.device(self._kind.kind, named)]
        if named is not None and named.index is not None:
            return self[named]
        for device in self.values():
            return device
        return self[self._kind.of_rank(rank)]
