"""What an operation costs on any number of machines: a model, calibrated by measurements.

The program is :mod:`collectives.bench.model`.
"""

from __future__ import annotations

__all__: list[str] = []
