"""The figures of the paper's evaluation (PyTorch Distributed, VLDB 2020): measured, kept and drawn.

Inside: the command, figures and the cells they consist of, ranks that measure these, tables and plots, the
report. Not here: models and images that are trained (:mod:`collectives.bench.models`).
"""

from __future__ import annotations
