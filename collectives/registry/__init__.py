"""The backends by name: how users write names, how modules are loaded, and what each backend can do.

A name may stand for a backend per device type: the group that takes each operation to its own is here, too.
Not here: the names under which ``torch.distributed`` knows them
(:mod:`collectives_registration`).
"""

from __future__ import annotations
