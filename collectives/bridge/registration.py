"""Registers our backends with ``torch.distributed``.

Registration is a few entries in torch's tables; the backend itself is imported when a group is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as torch_dist

__all__ = ["register", "register_backend"]


def register_backend(name: str, backend: str, devices: Sequence[str] = ("cpu",)) -> None:
    """Makes a backend of ours known to ``torch.distributed.init_process_group`` and ``new_group``.

    Args:
        name: name in torch, lower-case.
        backend: name in :mod:`collectives.registry`.
        devices: device types that it serves.

    Raises:
        ValueError: torch knows another backend of this name.
    """
    taken = torch_dist.Backend._plugins.get(name.upper())
    if taken is not None and not isinstance(taken.creator_fn, _Creator):
        raise ValueError(f"torch.distributed already has a backend {name!r}, registered by another package")
    torch_dist.Backend.register_backend(
        name, _Creator(name, backend), extended_api=True, devices=list(devices)
    )


class _Creator:
    """Makes groups of one backend for torch.

    Args:
        name: name in torch.
        backend: name in the registry.
    """

    def __init__(self, name: str, backend: str) -> None:
        self.name = name
        self.backend = backend

    def __call__(self, options: Any, pg_options: Any = None) -> Any:
        """Returns the group; called by torch on every member, blocks until they are connected.

        Args:
            options: torch's record of store, rank, size, time limit and names.
            pg_options: options of the backend itself, as the user gave them.
        """
        from collectives.bridge import creation

        return creation.create(self.name, self.backend, options, pg_options)


def register() -> None:
    """Registers the backends that come with this package."""
    register_backend("collectives", "host")
    register_backend("collectives_round_robin", "round_robin")
