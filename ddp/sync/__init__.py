"""What ranks tell each other: the model at the start, signals and errors at the end of a pass.

Not here: the gradients themselves (:mod:`collectives.ddp.reducer`).
"""

from __future__ import annotations
