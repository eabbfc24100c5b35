"""Which thresholds of the host backend are best on a machine.

Inside: groups that differ in thresholds, timed in turn; the decision which values are better beyond noise;
the command. Not here: the thresholds and their file (:mod:`collectives.backends.host.tuning_file`).
"""

from __future__ import annotations
