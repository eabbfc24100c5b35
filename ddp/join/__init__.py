"""Join: training on uneven inputs, where ranks without inputs go along with those that have some.

Inside: the context manager, its protocol, and what a joined rank communicates in the model's place.
"""

from __future__ import annotations

__all__: list[str] = []
