"""What all programs share: ranks, machines, devices, records, tables, plots, arguments.

Not here: anything about one question.
"""

from __future__ import annotations

__all__: list[str] = []
