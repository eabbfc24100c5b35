"""What this machine offers, whether two ranks can communicate on it, and which backend to use for what.

Inside: the tests of ``collectives doctor``; the advice at its end. Not here: the nccl backend on GPUs
(:mod:`collectives.bench.acceptance`).
"""

from __future__ import annotations
