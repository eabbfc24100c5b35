"""What a reducer is told about the model and the training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from collectives.ddp.mixed_precision import CastParameters

__all__ = ["ReducerOptions"]


@dataclass(frozen=True)
class ReducerOptions:
    """Options of a :class:`~collectives.ddp.reducer.reducer.Reducer`, equal on all ranks.

    Attributes:
        model: the model in words, for messages.
        limits: caps of the buckets in bytes, from :func:`~collectives.ddp.reducer.buckets.bucket_limits`.
        find_unused_parameters: whether parameters may be absent from a pass.
        gradient_as_bucket_view: whether ``.grad`` shares its memory with the buckets.
        static_graph: whether all passes use the parameters alike, so that the first one tells how.
        batched_grad_copy: whether gradients are collected when their bucket is full, all at once.
        skip_unused: whether buckets that no rank can fill are not sent.
        sparse: names of the parameters with sparse gradients.
        delayed: names of the parameters whose reduction waits for :attr:`trigger`.
        trigger: the parameter whose gradient the delayed ones wait for.
        frozen: parameters that need no gradient, by name.
        wire_dtype: data type that floating gradients are averaged in; ``None`` for their own.
        casts: what stands in for the parameters while forward and backward run.
    """

    model: str
    limits: Sequence[int]
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    batched_grad_copy: bool = False
    skip_unused: bool = False
    sparse: Collection[str] = ()
    delayed: Collection[str] = ()
    trigger: torch.nn.Parameter | None = None
    frozen: Mapping[str, torch.nn.Parameter] = field(default_factory=dict)
    wire_dtype: torch.dtype | None = None
    casts: CastParameters | None = None
