"""Mixed precision: forward and backward in fewer bits, over parameters that stay as they are.

While forward runs, every parameter of a floating type is replaced in its module by a cast of itself that
autograd records. Gradients so flow through the cast into the parameter's own ``.grad``, in its own type,
where they add up under ``no_sync`` without loss; only the reduction uses few bits. The casts stand in again
during the backward pass, for activation checkpoints, which run parts of forward once more there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from collectives.ddp.module.trees import map_tensors

_T = TypeVar("_T")


@dataclass(frozen=True)
class MixedPrecision:
    """Data types of a module in training; only what is of a floating type is cast.

    Attributes:
        param_dtype: of the parameters in forward and backward, and of the inputs; ``None`` for their own.
        reduce_dtype: of the gradients while they are averaged; ``None`` for ``param_dtype``.
        buffer_dtype: of the buffers, for good; ``None`` for their own.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, config: object) -> MixedPrecision:
        """Returns the settings of any object that has these three attributes, such as torch's.

        Args:
            config: the object.

        Raises:
            TypeError: one of them is missing or no floating type.
        """
        values = {}
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            value = getattr(config, name, "")
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(
                    f"mixed_precision.{name} must be a floating torch.dtype or None, but mixed_precision is "
                    f"{config!r}; pass collectives.ddp.MixedPrecision(...)"
                )
            values[name] = value
        return cls(**values)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """Data type that gradients are averaged in; ``None`` for their own."""
        return self.reduce_dtype or self.param_dtype


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
    """Casts the floating buffers of a module, in place."""
    if dtype is None:
        return
    for name, buffer in module.named_buffers():
        if name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


class CastParameters:
    """Casts of a module's parameters, which stand in for them while it runs.

    Args:
        dtype: data type of the casts.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._casts: dict[int, torch.Tensor] = {}
        self._depth = 0

    def find_parameters(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Takes the parameters of a module, but those of some names; before it runs."""
        self._places = []
        left_alone = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in ignored}
        for owner in module.modules():
            for key, parameter in owner._parameters.items():
                if parameter is None or not parameter.is_floating_point() or id(parameter) in left_alone:
                    continue
                self._places.append((owner, key, parameter))

    def inputs(self, value: _T) -> _T:
        """Returns ``value`` with its floating tensors cast."""
        dtype = self._dtype
        cast: _T = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)
        return cast

    @contextlib.contextmanager
    def forward(self) -> Generator[None, None, None]:
        """Context for a forward, with fresh casts."""
        self._casts = {}
        for _, _, parameter in self._places:
            if id(parameter) not in self._casts:
                self._casts[id(parameter)] = parameter.to(self._dtype)
        self.enter()
        try:
            yield
        finally:
            self.leave()
            if not torch.is_grad_enabled():
                self._casts = {}

    def enter(self) -> None:
        """Puts the casts of the latest forward in place; :meth:`leave` must follow."""
        self._depth += 1
        if self._depth == 1 and self._casts:
            self._put(self._casts)

    def leave(self) -> None:
        """Puts the parameters back."""
        self._depth -= 1
        if not self._depth:
            self._put({})

    def forget(self) -> None:
        """Lets go of the casts, after a backward pass."""
        if not self._depth:
            self._casts = {}

    def _put(self, casts: dict[int, torch.Tensor]) -> None:
        for owner, key, parameter in self._places:
            parameters: dict[str, Any] = owner._parameters
            parameters[key] = casts.get(id(parameter), parameter)
            if isinstance(owner, nn.RNNBase):  # keeps a list of its own
                names = owner._flat_weights_names
                if key in names:
                    owner._flat_weights[names.index(key)] = parameters[key]
