"""What a model is made of, so that it is found out when a program changes that."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from collectives.ddp.agreement import tensor_in_words

_DTYPE = attrgetter("dtype")
_SIZE = torch.Tensor.numel


class Structure:
    """The modules and parameters of a model, at the places where they are.

    Programs replace them after the model was wrapped, as by ``setattr``, ``load_state_dict(assign=True)`` or
    ``weight_norm``; nothing tells. To ask is cheap, so that every forward can do it.

    Args:
        model: the outermost module; not kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables: list[dict[str, Any]] = []
        self._owners: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._members: list[object] = []
        self._absent: list[tuple[dict[str, Any], str]] = []
        for module in model.modules():
            tables: tuple[Any, ...] = (module._parameters, module._modules, module._buffers)
            if not all(isinstance(table, dict) for table in tables):  # of a scripted module, which is fixed
                continue
            self._tables += tables
            for table in tables[:2]:
                for key, member in table.items():
                    self._owners.append(table)
                    self._keys.append(key)
                    self._members.append(member)
            self._absent += [(tables[2], key) for key, buffer in tables[2].items() if buffer is None]
        self._count = sum(map(len, self._tables))

    def has_changed(self) -> bool:
        """Returns whether a module or parameter is another one, or one of them, or a buffer, came or went."""
        return not (
            all(map(is_, map(dict.get, self._owners, self._keys), self._members))
            and sum(map(len, self._tables)) == self._count
            and all(table.get(key) is None for table, key in self._absent)
        )


class Kinds:
    """The data types and sizes of parameters, which a program may change, as by ``module.double()``.

    Args:
        parameters: the parameters by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = dict(parameters)
        self._tensors = list(parameters.values())
        self._words = list(map(tensor_in_words, self._tensors))
        self._dtypes, self._sizes = self._current()

    def _current(self) -> tuple[list[torch.dtype], list[int]]:
        return list(map(_DTYPE, self._tensors)), list(map(_SIZE, self._tensors))

    def changes(self) -> list[str]:
        """Returns the names of those that have others by now, each with both in words."""
        if self._current() == (self._dtypes, self._sizes):
            return []
        triples = zip(self._parameters.items(), self._words, self._dtypes, self._sizes, strict=True)
        return [
            f"{name} ({tensor_in_words(parameter)} instead of {before})"
            for (name, parameter), before, dtype, size in triples
            if parameter.dtype is not dtype or parameter.numel() != size
        ]
