"""Arguments of DistributedDataParallel, checked against each other and the module."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from collectives import ProcessGroup, UnsupportedOperationError
from collectives.ddp.default_group import resolve_group

Device = int | str | torch.device

MIB = 1024 * 1024

_DEFAULT_CAP_MIB = 25
"""Cap where the user names none (section 4.2 of the paper)."""

FIRST_BUCKET_BYTES = MIB
"""Cap of the first bucket: small, so that communication starts soon after the backward pass did."""


@dataclass(frozen=True)
class Settings:
    """What a model's gradients are averaged by: the arguments of DistributedDataParallel, checked.

    Attributes:
        model: the model in words, for messages.
        group: the ranks.
        device: device of the first parameter, and of tensors that the group takes.
        parameters: parameters that need gradients, by name.
        sparse: indices of those with sparse gradients, which lie in no bucket.
        delayed: further parameters that need gradients, by name; no other setting applies to them.
        trigger: the parameter whose gradient they wait for.
        frozen: parameters that need no gradient, by name.
        limits: caps of the buckets in bytes, from :func:`bucket_limits`.
        find_unused: whether parameters may be unused in a pass.
        skip_unused: whether gradients are not sent that no rank can have.
        static: whether all passes use the parameters alike.
        as_views: whether ``.grad`` becomes the place in the bucket.
        batched: whether all gradients are copied when their bucket is full.
        reduce_dtype: data type that floating gradients are averaged in; ``None`` for their own.
    """

    model: str
    group: ProcessGroup
    device: torch.device
    parameters: Mapping[str, nn.Parameter]
    sparse: Collection[int]
    delayed: Mapping[str, nn.Parameter]
    trigger: nn.Parameter | None
    frozen: Mapping[str, nn.Parameter]
    limits: Sequence[int]
    find_unused: bool
    skip_unused: bool
    static: bool
    as_views: bool
    batched: bool
    reduce_dtype: torch.dtype | None

    def where(self) -> str:
        """Returns rank, model and group in words, for messages."""
        return f"[rank {self.group.rank()}] {self.model} over {self.group.describe()}"


def check_devices(
    parameters: Iterable[nn.Parameter], device_ids: Sequence[Device] | None, output_device: Device | None
) -> tuple[list[torch.device], torch.device | None, torch.device | None]:
    """Returns the devices of parameters, and those that inputs and outputs are moved to, where they are.

    Args:
        parameters: the module's parameters.
        device_ids: as given by the user.
        output_device: as given by the user.

    Raises:
        ValueError: the arguments do not fit the module.
    """
    devices = list(dict.fromkeys(parameter.device for parameter in parameters))
    words = ", ".join(map(str, devices))
    first = devices[0]
    if len({device.type for device in devices}) > 1:
        raise ValueError(f"all parameters must be on devices of one type, but are on {words}")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids must name one device, because a process drives one, but is {list(device_ids)}"
        )
    if not device_ids and output_device is None:
        return devices, None, None
    if first.type == "cpu" or len(devices) > 1:
        raise ValueError(
            "device_ids and output_device are for modules on one device that is not the CPU, but are "
            f"{device_ids} and {output_device}, and the parameters are on {words}; leave them out"
        )
    if not device_ids:
        raise ValueError(
            f"output_device is {output_device}, but needs device_ids; give the module's device, {words}"
        )
    target = _device(device_ids[0], first)
    if target != first:
        raise ValueError(f"device_ids is {list(device_ids)}, but the parameters are on {words}")
    return devices, target, target if output_device is None else _device(output_device, first)


def _device(device: Device, like: torch.device) -> torch.device:
    found = torch.device(like.type, device) if isinstance(device, int) else torch.device(device)
    return found if found.index is not None else torch.device(found.type, like.index)


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


def bucket_limits(
    bucket_cap_mb: float | None = None, bucket_cap_mb_list: Sequence[float] | None = None
) -> list[int]:
    """Returns the caps of the first buckets in bytes, in order; the last one holds for all further buckets.

    Args:
        bucket_cap_mb: cap in MiB; ``None`` for 25; zero puts every gradient alone. The first bucket's is 1
            MiB where that is less.
        bucket_cap_mb_list: caps in MiB of the first bucket, the second, and so on; taken as they are.

    Raises:
        TypeError: a cap is no number.
        ValueError: a cap is negative or not finite, the list is empty, or both arguments are given.
    """
    if bucket_cap_mb_list is not None:
        if bucket_cap_mb is not None:
            raise ValueError(
                f"give bucket_cap_mb or bucket_cap_mb_list, not both: got {bucket_cap_mb} and "
                f"{list(bucket_cap_mb_list)}"
            )
        if not bucket_cap_mb_list:
            raise ValueError(
                "bucket_cap_mb_list is empty; give at least one cap in MiB, or None for the default"
            )
        return [_cap_bytes("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list]
    cap = _cap_bytes("bucket_cap_mb", _DEFAULT_CAP_MIB if bucket_cap_mb is None else bucket_cap_mb)
    return [min(FIRST_BUCKET_BYTES, cap), cap]


def _cap_bytes(name: str, cap: float) -> int:
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        raise TypeError(f"{name} must be a number of MiB, but is {cap!r} of type {type(cap).__name__}")
    if cap < 0 or not math.isfinite(cap):
        raise ValueError(f"{name} must be zero or positive and finite, but is {cap}")
    return int(cap * MIB)


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
    """Returns the names of the parameters whose reduction is delayed, in the order of the model's parameters.

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
    known = set(map(id, parameters.values()))
    for name, parameter in delayed:
        if id(parameter) not in known:
            raise ValueError(
                f"delay_all_reduce_named_params has {name!r}, which is no parameter of the module that is "
                "averaged"
            )
    chosen = {id(parameter) for _, parameter in delayed}
    return [name for name, parameter in parameters.items() if id(parameter) in chosen]


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
    for what, annotation, expected in (
        ("argument bucket", bucket.annotation if bucket else inspect.Parameter.empty, "GradBucket"),
        ("return value", signature.return_annotation, "Future[Tensor]"),
    ):
        words = (
            annotation
            if isinstance(annotation, str)
            else f"{getattr(annotation, '__name__', '')} {annotation!r}"
        )
        if annotation is not inspect.Parameter.empty and expected.partition("[")[0] not in words:
            raise ValueError(
                f"the {what} of a communication hook must be annotated {expected}, but {hook!r} says "
                f"{annotation!r}"
            )
