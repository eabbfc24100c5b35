"""The reducer: averages gradients over all ranks while the backward pass computes them.

Inside: buckets, their layout and order, the gradients in them, and their reduction. Not here: what ranks tell
each other at the end of a pass (:mod:`collectives.ddp.sync`), and parameters without a gradient
(:mod:`collectives.ddp.unused_parameters`).

The way of a gradient from the autograd engine to the all-reduce:

1. ``hook`` on the parameter (``reducer.py``, made by ``_gradient_hook``): the engine calls it when the
   gradient was accumulated in ``.grad``.
2. ``Reducer.autograd_hook`` (``reducer.py``): begins the pass, counts the gradient, asks whether more is
   to come.
3. ``Reducer._mark_ready`` (``reducer.py``): has it copied to its bucket view and counted in its bucket.
4. ``BucketReducer.launch_ready`` (``bucket_reducer.py``): launches full buckets in their order.
5. ``Averager.start`` (``averaging.py``): issues the all-reduce, by the group's fast path where it has one.

The end of the pass is ``Reducer._finalize_backward``, which waits and writes the averages to ``.grad``.
"""

from __future__ import annotations

__all__: list[str] = []
