"""What data parallel training needs of autograd and of ``torch.compile``.

Inside: names that are private to torch, which nothing else of :mod:`collectives.ddp` touches. Not here:
what the hooks on parameters do (:mod:`collectives.ddp.reducer`).
"""

from __future__ import annotations
