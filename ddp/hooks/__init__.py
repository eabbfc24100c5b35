"""Communication hooks: how a full bucket of gradients is averaged.

A hook takes the state given to ``register_comm_hook`` and a :class:`~collectives.ddp.GradBucket`, and returns
a future of the averaged flat tensor.
"""

from __future__ import annotations

from collectives.ddp.hooks import debugging_hooks, default_hooks

__all__ = ["debugging_hooks", "default_hooks"]
