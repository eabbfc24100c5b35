"""Parameters that get no gradient in a backward pass: which, what is sent for them, and the error about them.

Inside: the tracker that the reducer asks, the words of the errors, the search of the graph. Not here: ranks
without inputs (:mod:`collectives.ddp.join`).
"""

from __future__ import annotations
