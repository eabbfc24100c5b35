"""What several backends need: forwarding to groups, messages to the own rank, failures told by the store.

Not here: anything that only one backend uses.
"""

from __future__ import annotations

__all__: list[str] = []
