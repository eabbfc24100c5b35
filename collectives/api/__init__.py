"""The functions that users call, with the names of ``torch.distributed``.

Inside: collectives, messages, objects, coalescing, the world and its groups, debugging. Not here: what a
group is (:mod:`collectives.core`) and how one is chosen by name (:mod:`collectives.registry`).
"""

from __future__ import annotations
