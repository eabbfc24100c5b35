"""The backends: modules that make process groups of one kind each.

Inside: a folder for each, what several share (``_shared``), and the C++ core (``native``). Not here: their
names and the choice among them (:mod:`collectives.registry.backends`), which loads them; nobody else
imports them.
"""

from __future__ import annotations

if __name__ != "collectives.backends":
    raise ImportError("this folder is the package collectives.backends; import it by that name")
