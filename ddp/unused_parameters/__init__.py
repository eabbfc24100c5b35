"""Parameters that get no gradient in a pass: found, left out, and named in errors.

Not here: ranks without inputs (:mod:`collectives.ddp.join`).
"""

from __future__ import annotations

__all__: list[str] = []
