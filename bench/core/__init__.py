"""What all programs share: arguments, records and their text, machines and devices, groups, a barrier.

Not here: anything about one question, and the processes of ranks (:mod:`collectives.ranks`).
"""

from __future__ import annotations
