"""Errors of data parallel training; all are told to all ranks of the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from collectives.errors import DistError


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


class JoinError(DistError):
    """The ranks in a :class:`~collectives.ddp.Join` cannot go on together; the group stays usable.

    Attributes:
        ranks: those at fault, within the group; empty where they are not known.
    """

    def __init__(self, message: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)

    def __reduce__(self) -> tuple[type[JoinError], tuple[str, list[int]]]:
        return type(self), (str(self), self.ranks)


class UnevenInputsError(JoinError):
    """Ranks ran out of inputs before others, under ``throw_on_early_termination``; raised on all ranks."""
