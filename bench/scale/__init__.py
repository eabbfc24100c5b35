"""What a world, a group and an operation need as machines and ranks grow in number.

Inside: the program, the steps of a rank, what a process holds, a store that counts, laws of growth. Not here:
predictions (:mod:`collectives.bench.cost_model`), the calls of a store in a second
(:mod:`collectives.bench.store`).
"""

from __future__ import annotations
