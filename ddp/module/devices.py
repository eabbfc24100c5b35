"""Where a module lives: on the CPU, on one device, or spread over several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from collectives.ddp.autograd.trees import map_tensors

__all__ = ["ModuleDevices"]

_T = TypeVar("_T")
Device = int | str | torch.device


class ModuleDevices:
    """Devices of a module, checked against the arguments that name some.

    Attributes:
        first: device of the first parameter.
        several: whether parameters are on several devices.
        input_device: device that inputs are moved to, or ``None``.
        output_device: device that outputs are moved to, or ``None``.

    Args:
        parameters: the module's parameters.
        device_ids: as given by the user.
        output_device: as given by the user.

    Raises:
        ValueError: the arguments do not fit the module.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device_ids: Sequence[Device] | None,
        output_device: Device | None,
    ) -> None:
        devices = list(dict.fromkeys(parameter.device for parameter in parameters))
        words = ", ".join(map(str, devices))
        if len({device.type for device in devices}) > 1:
            raise ValueError(f"all parameters must be on devices of one type, but are on {words}")
        self.first = devices[0]
        self.several = len(devices) > 1
        self.input_device: torch.device | None = None
        self.output_device: torch.device | None = None
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                f"device_ids must name one device, because a process drives one, but is {list(device_ids)}"
            )
        if not device_ids and output_device is None:
            return
        if self.first.type == "cpu" or self.several:
            raise ValueError(
                "device_ids and output_device are for modules on one device that is not the CPU, but are "
                f"{device_ids} and {output_device}, and the parameters are on {words}; leave them out"
            )
        if not device_ids:
            raise ValueError(
                f"output_device is {output_device}, but needs device_ids; give the module's device, {words}"
            )
        target = self._device(device_ids[0])
        if target != self.first:
            raise ValueError(f"device_ids is {list(device_ids)}, but the parameters are on {words}")
        self.input_device = target
        self.output_device = target if output_device is None else self._device(output_device)

    def _device(self, device: Device) -> torch.device:
        if isinstance(device, int):
            return torch.device(self.first.type, device)
        found = torch.device(device)
        return found if found.index is not None else torch.device(found.type, self.first.index)

    def move_inputs(self, value: _T) -> _T:
        """Returns ``value`` with its tensors on the input device, where there is one."""
        target = self.input_device
        if target is None:
            return value
        moved: _T = map_tensors(lambda tensor: tensor.to(target, non_blocking=True), value)
        return moved

    def move_outputs(self, value: _T) -> _T:
        """Returns ``value`` with its tensors on the output device, where that is not the module's."""
        target = self.output_device
        if target is None or target == self.first:
            return value
        moved: _T = map_tensors(lambda tensor: tensor.to(target, non_blocking=True), value)
        return moved
