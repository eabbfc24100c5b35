"""Whether the nccl backend holds on the GPUs of a machine: ``collectives accept``.

Inside: the command with its sections of rows, the report, where the tensors are (platform), and what ranks
run for a row (cases). Not here: what every function must give (:mod:`collectives.conformance`), the double of
NCCL (``tests/nccl_double``).
"""

from __future__ import annotations
