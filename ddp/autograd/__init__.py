"""What data parallel training needs of autograd and of ``torch.compile``.

Most of it is private to torch; nothing else of :mod:`collectives.ddp` touches such names.
"""

from __future__ import annotations

__all__: list[str] = []
