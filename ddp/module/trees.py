"""Tensors within nested containers: what forward takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

_DEPTH = 3
"""How many objects within objects are looked into; containers and dataclasses do not count."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in ``value``, however deep in containers, and in attributes of objects.

    Modules, functions and classes are not looked into.
    """
    return _walk(value, set(), _DEPTH)


def _walk(value: Any, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, complex, type, torch.nn.Module)):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif depth and hasattr(value, "__dict__") and not callable(value):
        parts = list(vars(value).values())
        depth -= 1
    for part in parts:
        yield from _walk(part, seen, depth)


def moved(value: Any, device: torch.device | None) -> Any:
    """Returns ``value`` with its tensors on a device, or as it is for ``None``."""
    return value if device is None else map_tensors(lambda t: t.to(device, non_blocking=True), value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns ``value`` with ``function`` applied to the tensors in lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        parts = [map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        return [map_tensors(function, part) for part in value]
    if isinstance(value, dict):
        return type(value)((key, map_tensors(function, part)) for key, part in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: map_tensors(function, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changes)
    return value
