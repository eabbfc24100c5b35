"""The reducer: averages gradients over all ranks while the backward pass computes them.

Inside: buckets, their layout and order, the gradients in them, and their reduction; the way of a gradient
through these modules is in ``docs/internals/architecture.md``. Not here: what ranks tell each other at the
end of a pass (:mod:`collectives.ddp.sync`), and unused parameters
(:mod:`collectives.ddp.unused_parameters`).
"""

from __future__ import annotations
