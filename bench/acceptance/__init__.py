"""Whether the nccl backend holds on the GPUs of a machine: ``collectives accept``.

Inside: the command, its report, where the tensors are (platform), the sections of rows, and what goes wrong
on ranks (failures). Not here: what every function must give (:mod:`collectives.conformance`), the double of
NCCL (``tests/nccl_double``).
"""

from __future__ import annotations
