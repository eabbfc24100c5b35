"""The bridge to ``torch.distributed``: our backends under ``torch.distributed.init_process_group``.

Where the package is installed torch knows them (:mod:`collectives_registration`), at the latest after
``import collectives``. A program that uses ``torch.distributed`` then runs on ``collectives`` (CPU tensors:
the host backend, CUDA tensors: nccl), ``collectives_mpi`` or ``collectives_round_robin`` by that one word.
"""

from __future__ import annotations

from collectives_registration import register, register_backend

__all__ = ["register", "register_backend"]
