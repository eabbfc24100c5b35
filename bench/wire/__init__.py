"""``collectives bench wire``: the processor time of bytes between machines.

Inside: the command and its report (command), what each rank carries out (rank), and how bytes are moved by
system calls alone (ways). Not here: times of whole operations (:mod:`collectives.bench.comparison`).
"""

from __future__ import annotations
