"""The reducer: averages gradients over all ranks while the backward pass computes them.

Inside: the buckets, their reduction, unused parameters, and what ranks tell each other at the end of a pass;
the way of a gradient through these modules is in ``docs/internals/architecture.md``.
"""

from __future__ import annotations
