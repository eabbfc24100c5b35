"""Benchmarks, one program per question: ``collectives bench NAME``, and ``demo`` and ``doctor``.

Inside: the programs; what calls move (operations) and whose they are (peers); what training is measured with
(models); in folders what all share (core), and the programs of several modules (acceptance, paper). Not here:
processes of ranks (:mod:`collectives.ranks`), the command (:mod:`.cli`).
"""

from __future__ import annotations

if __name__ != "collectives.bench":
    raise ImportError("this folder is the package collectives.bench; import it by that name")

PROGRAMS = {
    "allreduce": "collectives.bench.allreduce",
    "ddp": "collectives.bench.ddp",
    "paper": "collectives.bench.paper.command",
    "store": "collectives.bench.store",
}
"""Modules of the programs by name; each has ``add_arguments(parser)`` and ``run(arguments) -> int``.

One with ``EVERY_RANK = True`` is carried out by every process that a launcher started.
"""
