"""Measurements: one program per question, one result record, tables and plots.

Every program runs its ranks as processes of this machine, times its peers in turn within one run, and takes
the slowest rank's time of each call. Programs are reached from the command line: ``collectives bench NAME``.

Words used here: a *peer* is what is measured, usually a backend; a *call* is one use of the measured function
on all ranks at once; a *turn* is a few calls of one peer in a row; peers alternate by turns, so that noise of
the machine meets all of them alike.
"""

from __future__ import annotations

if __name__ != "collectives.bench":
    raise ImportError("this folder is the package collectives.bench; import it by that name")

__all__ = ["PROGRAMS"]

PROGRAMS = {
    "allreduce": "collectives.bench.allreduce",
    "collectives": "collectives.bench.every_operation",
    "ddp": "collectives.bench.ddp",
    "hooks": "collectives.bench.hooks",
    "model": "collectives.bench.model",
}
"""Modules of the programs by name; each has ``add_arguments(parser)`` and ``run(arguments) -> int``."""
