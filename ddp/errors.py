"""Errors of data parallel training; both are told to all ranks of the group."""

from __future__ import annotations

from collections.abc import Mapping

from collectives.errors import DistError

__all__ = ["GradientSyncError", "ModelMismatchError"]


class ModelMismatchError(DistError):
    """The ranks wrapped different models or asked for different options; raised on all, before any change."""


class GradientSyncError(DistError):
    """Gradients could not be averaged in this backward pass; raised on all ranks at its end.

    Gradients of this pass are undefined: zero them before going on. Model and group stay usable.

    Attributes:
        reasons: what went wrong, by rank within the group; ranks without fault are absent.
    """

    def __init__(self, message: str = "", reasons: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})

    def __reduce__(self) -> tuple[type[GradientSyncError], tuple[str, dict[int, str]]]:
        return type(self), (str(self), self.reasons)
