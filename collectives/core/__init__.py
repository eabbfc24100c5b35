"""The contract between users and backends: ``ProcessGroup``, ``Work``, reductions and option records.

Inside: the base classes, data types, capabilities and the checks of arguments. Not here: functions for users
(:mod:`collectives.api`) and implementations (:mod:`collectives.backends`).
"""

from __future__ import annotations
