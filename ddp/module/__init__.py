"""What DistributedDataParallel does to the wrapped module besides averaging its gradients.

Inside: the checks of its arguments, devices, buffers, mixed precision, synchronised batch normalisation. Not
here: the model's hooks into autograd (:mod:`collectives.ddp.reducer`).
"""

from __future__ import annotations
