"""What a process can tell afterwards: the last operations of its groups, counts of all of them, and dumps.

Inside: the record of a group, its dump as JSON, and the signal that asks for one. Not here: what reads the
files of all ranks (:mod:`collectives.cli`), and the core's own ring (``backends/native/engine``).
"""

from __future__ import annotations
