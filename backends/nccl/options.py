"""What a user can choose of an NCCL group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from collectives.backends.nccl.libnccl.config import NcclConfig
from collectives.core.arguments.option_records import BackendOptions
from collectives.registry.backends import refuse_unknown_options

__all__ = ["Options", "checked_options", "option_names"]

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(slots=True)
class Options(BackendOptions):
    """Options of the nccl backend, given as ``pg_options``; equal on all ranks.

    Attributes:
        is_high_priority_stream: whether communication runs on streams that the device prefers.
        config: settings of the communicators; those that the loaded NCCL does not read are refused when a
            communicator is made.
        duplex_messages: whether the messages of two ranks wait only for earlier ones of the same direction,
            which takes a second communicator for each pair of ranks, with its memory.
        provider: ``"cupy"`` or ``"pynccl"``; ``None`` for the one that ``COLLECTIVES_NCCL_PROVIDER`` names,
            and without it the first that works.
        blocking_wait: whether ``wait()`` blocks the host until the operation is done, so that its error is
            raised there, instead of letting only the current stream wait; ``None`` for what
            ``TORCH_NCCL_BLOCKING_WAIT`` says, and without it False.
    """

    is_high_priority_stream: bool = False
    config: NcclConfig = field(default_factory=NcclConfig)
    provider: str | None = None
    blocking_wait: bool | None = None
    duplex_messages: bool = False

    _backend: ClassVar[str] = "nccl"

    @property
    def waits_block(self) -> bool:
        """Whether ``wait()`` blocks the host, by choice or by the environment."""
        if self.blocking_wait is not None:
            return self.blocking_wait
        return os.environ.get(_BLOCKING_WAIT, "").strip().lower() in {"1", "t", "true", "y", "yes"}


def option_names() -> tuple[str, ...]:
    """Returns the names of the options."""
    return tuple(option.name for option in fields(Options))


def checked_options(given: Any, rank: int) -> Options:
    """Returns the options that a user gave, as a record or as a dict of some fields, or the default ones.

    Raises:
        TypeError: they are something else.
    """
    if given is None:
        return Options()
    if isinstance(given, Mapping):
        refuse_unknown_options(given, option_names(), f"[rank {rank}] pg_options of the nccl backend:")
        given = Options(**given)
    if not isinstance(given, Options):
        raise TypeError(
            f"[rank {rank}] pg_options of the nccl backend must be ProcessGroupNCCL.Options of collectives, "
            f"but are of type {type(given).__module__}.{type(given).__name__}"
        )
    if not isinstance(given.config, NcclConfig):
        raise TypeError(
            f"[rank {rank}] pg_options.config must be a NcclConfig, but is of type "
            f"{type(given.config).__name__}"
        )
    return given
