"""Data parallel training, timed: wrappers and communication hooks side by side.

Inside: models and tasks, peers, hooks, what every rank runs, records and tables. Not here: the program
(:mod:`collectives.bench.ddp`).
"""

from __future__ import annotations
