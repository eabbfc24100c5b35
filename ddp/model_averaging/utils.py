"""Averages of parameters over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from collectives import ProcessGroup
from collectives.ddp.agreement import describe_model, verify_agreement
from collectives.ddp.broadcast import write_changes
from collectives.ddp.default_group import is_outside, resolve_group
from collectives.ddp.errors import ModelMismatchError
from collectives.ddp.reducer.averaging import average
from collectives.ddp.reducer.buckets import flat_by_kind
from collectives.dynamo import leave_uncompiled

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]


@leave_uncompiled
def average_parameters(params: Iterable[torch.Tensor], process_group: ProcessGroup | None = None) -> None:
    """Averages parameters over a group, in place; called by all of its ranks, blocks.

    Parameters of one data type and device travel as one message, for which they are copied; they keep their
    memory, data types and strides. The mean is bitwise the same on all ranks. These first make sure that they
    average the same things, by 16 bytes.

    Args:
        params: floating or complex parameters of the same shapes and data types on all ranks; at least one on
            all or on none.
        process_group: the ranks; ``None`` for the default group. Where this rank is outside of it
            (``GroupMember.NON_GROUP_MEMBER``), nothing happens.

    Raises:
        ModelMismatchError: ranks give different parameters; raised on all of them, before any change.
    """
    _average(list(params), lambda _: True, process_group)


@torch.no_grad()
def _average(
    params: Iterable[torch.Tensor], chooses: Callable[[torch.Tensor], bool], process_group: object
) -> None:
    """Averages some of the parameters; ranks have the same ones, but may choose others by mistake."""
    if is_outside(process_group):
        return
    group = resolve_group(process_group)
    chosen: dict[str, torch.Tensor] = {}
    device: torch.device | None = None
    for place, parameter in enumerate(params):
        device = device or parameter.device
        if chooses(parameter):
            chosen[str(place)] = parameter
    if device is None:
        return
    # Else means of different parameters of the same size would be taken without a word.
    try:
        verify_agreement(group, describe_model(chosen, {}, {}), device, "the average of parameters")
    except ModelMismatchError as error:
        raise ModelMismatchError(
            f"{error}\nOnly parameters that have a gradient are averaged where the optimizer does it; give "
            "those that are not used on all ranks one of zeros, or call average_parameters() with all"
        ) from None
    moving = []
    for flat, tensors, views in flat_by_kind(parameter.detach() for parameter in chosen.values()):
        torch._foreach_copy_(views, tensors)
        moving.append((average(group, flat), tensors, views))
    for work, tensors, views in moving:
        work.wait()
        write_changes(tensors, views)


@leave_uncompiled
def get_params_to_average(
    params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]],
) -> list[torch.Tensor]:
    """Returns those parameters that have a gradient.

    Args:
        params: parameters of a model, or parameter groups of an optimizer.

    Raises:
        TypeError: an item is neither.
    """
    return list(filter(_has_gradient, parameters_of(params)))


def _has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None


def parameters_of(params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Returns the parameters of an iterable of them, or of an optimizer's parameter groups.

    Raises:
        TypeError: an item is neither.
    """
    found: list[torch.Tensor] = []
    for item in params:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, Mapping):
            found.extend(item["params"])
        else:
            raise TypeError(
                f"params must hold parameters or parameter groups, but holds a value of type "
                f"{type(item).__name__}"
            )
    return found


@leave_uncompiled
def average_parameters_or_parameter_groups(
    params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]], process_group: ProcessGroup | None = None
) -> None:
    """Averages those parameters that have a gradient over a group; called by all of its ranks, blocks.

    Args:
        params: parameters of a model, or parameter groups of an optimizer. Those that have a gradient must be
            the same on all ranks, also where each rank trains by itself: give those that are not used
            everywhere a gradient of zeros, or call :func:`average_parameters` with all.
        process_group: as for :func:`average_parameters`.

    Raises:
        ModelMismatchError: parameters that have a gradient differ between ranks; raised on all of them.
        TypeError: an item is neither.
    """
    _average(parameters_of(params), _has_gradient, process_group)
