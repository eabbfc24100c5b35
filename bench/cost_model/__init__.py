"""What an operation costs on any number of machines: a model, calibrated by measurements.

Inside: what each algorithm does, in counts; prices of these; calibration; predictions, their text and plot;
the command. Not here: measuring (:mod:`collectives.bench.comparison`).
"""

from __future__ import annotations
