"""The backends by name: how users write names, how modules are loaded, and what each backend can do.

Not here: the names under which ``torch.distributed`` knows them
(:mod:`collectives_registration`).
"""

from __future__ import annotations

__all__: list[str] = []
