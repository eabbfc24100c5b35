"""Arguments of DistributedDataParallel, checked against each other and the module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from collectives import ProcessGroup, UnsupportedOperationError
from collectives.ddp.default_group import resolve_group
from collectives.ddp.module.trees import map_tensors

__all__ = ["ModuleDevices", "check_delayed", "check_hook", "check_parameters", "group_of"]

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
        return _moved(value, self.input_device)

    def move_outputs(self, value: _T) -> _T:
        """Returns ``value`` with its tensors on the output device, where that is not the module's."""
        return _moved(value, None if self.output_device == self.first else self.output_device)


def _moved(value: _T, target: torch.device | None) -> _T:
    if target is None:
        return value
    moved: _T = map_tensors(lambda tensor: tensor.to(target, non_blocking=True), value)
    return moved


def group_of(process_group: object | None, device_mesh: object | None) -> ProcessGroup:
    """Returns the ranks that the arguments name.

    Args:
        process_group: as given by the user.
        device_mesh: a mesh of one dimension over such groups, as from ``torch.distributed.init_device_mesh``.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: both are given, or the mesh has more dimensions, or there is no default group.
    """
    if device_mesh is None:
        return resolve_group(process_group)
    if process_group is not None:
        raise ValueError(
            f"give process_group or device_mesh, not both: got {process_group!r} and {device_mesh!r}"
        )
    get_group = getattr(device_mesh, "get_group", None)
    dimensions = getattr(device_mesh, "ndim", None)
    if not callable(get_group) or dimensions is None:
        raise TypeError(f"device_mesh must be a DeviceMesh, but is of type {type(device_mesh).__name__}")
    if dimensions != 1:
        raise ValueError(
            f"device_mesh must have one dimension, but has {dimensions}: {device_mesh!r}; name the one to "
            "average over, as in mesh['replicate']"
        )
    return resolve_group(get_group(mesh_dim=0))


def check_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Checks that gradients of these parameters can be averaged.

    Raises:
        RuntimeError: none needs a gradient, one is not initialised, or nothing can be trained here.
        UnsupportedOperationError: an optimizer steps one within the backward pass.
    """
    kind = type(module).__name__
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{kind} is wrapped within torch.inference_mode(), where nothing can be trained; leave it first"
        )
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"parameter {name} of {kind} is not initialised; run forward once before wrapping"
            )
        if parameter.device.type == "meta":
            raise RuntimeError(
                f"parameter {name} of {kind} is on the meta device; materialise it before wrapping"
            )
        if parameter.is_inference():
            raise RuntimeError(
                f"parameter {name} of {kind} was made within torch.inference_mode(), so that it can have no "
                "gradient; make the module outside"
            )
    stepped = [name for name, p in parameters.items() if hasattr(p, "_in_backward_optimizers")]
    if stepped:
        raise UnsupportedOperationError(
            f"parameter {stepped[0]} of {kind} has an optimizer that steps within the backward pass, with "
            "this rank's gradient alone; step after backward(), or register hook_with_zero_step of "
            "collectives.ddp.hooks.ddp_zero_hook"
        )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise RuntimeError(
            f"no parameter of {kind} needs a gradient: there is nothing to average; do not wrap it"
        )


def check_delayed(
    parameters: Mapping[str, nn.Parameter],
    delayed: Sequence[tuple[str, nn.Parameter]] | None,
    trigger: nn.Parameter | None,
) -> list[str]:
    """Returns the names of the parameters whose reduction is delayed.

    Args:
        parameters: the module's parameters by name.
        delayed: as given by the user.
        trigger: the parameter whose gradient they wait for.

    Raises:
        TypeError: the trigger is no parameter.
        ValueError: only one of both is given, a name is not that parameter's, or the trigger never gets a
            gradient.
    """
    if (delayed is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce go together, but only "
            f"{'the second' if delayed is None else 'the first'} is given"
        )
    if delayed is None or trigger is None:
        return []
    if not isinstance(trigger, nn.Parameter):
        raise TypeError(
            f"param_to_hook_all_reduce must be a parameter, but is of type {type(trigger).__name__}"
        )
    if not trigger.requires_grad:
        raise ValueError("param_to_hook_all_reduce needs no gradient, so that nothing would follow it")
    names = {id(parameter): name for name, parameter in parameters.items()}
    for name, parameter in delayed:
        if id(parameter) not in names:
            raise ValueError(
                f"delay_all_reduce_named_params has {name!r}, which is no parameter of the module that is "
                "averaged"
            )
    return [names[id(parameter)] for _, parameter in delayed]


def check_hook(hook: object) -> None:
    """Checks that a communication hook can be called as one.

    Raises:
        TypeError: it is not callable, or does not take a state and a bucket.
        ValueError: its annotations name other types than a GradBucket and a Future of a tensor.
    """
    if not callable(hook):
        raise TypeError(
            f"a communication hook must be callable, but is {hook!r} of type {type(hook).__name__}"
        )
    signature = inspect.signature(hook)
    positional = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in positional):
        raise TypeError(
            f"a communication hook takes a state and a bucket, but {hook!r} has the signature {signature}"
        )
    bucket = signature.parameters.get("bucket")
    _check_annotation(
        hook, "argument bucket", bucket.annotation if bucket else inspect.Parameter.empty, "GradBucket"
    )
    _check_annotation(hook, "return value", signature.return_annotation, "Future[Tensor]")


def _check_annotation(hook: object, what: str, annotation: object, expected: str) -> None:
    if annotation is inspect.Parameter.empty:
        return
    words = (
        annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "") + repr(annotation)
    )
    if expected.partition("[")[0] not in words:
        raise ValueError(
            f"the {what} of a communication hook must be annotated {expected}, but {hook!r} says "
            f"{annotation!r}"
        )
