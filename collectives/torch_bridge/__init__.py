"""The bridge to ``torch.distributed``: our backends under ``torch.distributed.init_process_group``.

Inside: a ``torch.distributed.ProcessGroup`` around one of ours, its Work, its operators and dispatch modes,
and the registration of names. Not here: our own functions (:mod:`collectives.api`).
"""

from __future__ import annotations

from collectives_registration import register, register_backend

__all__ = ["register", "register_backend"]
