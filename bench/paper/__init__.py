"""The figures of the paper's evaluation (PyTorch Distributed, VLDB 2020): measured, kept and drawn.

Inside: the command, figures and the cells they consist of, what ranks measure, tables, plots.
Not here: wrappers, models and images that are trained (:mod:`collectives.bench.training`).
"""

from __future__ import annotations
