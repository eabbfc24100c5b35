"""Data parallel training, timed: with wrappers side by side, and with communication hooks one by one.

Inside: models and tasks, peers, what every rank runs, records and tables. Not here: the programs
(:mod:`collectives.bench.ddp`, :mod:`collectives.bench.hooks`).
"""

from __future__ import annotations
