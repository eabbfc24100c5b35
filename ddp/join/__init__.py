"""Join: training on uneven inputs, where ranks without inputs go along with those that have some.

Inside: the context manager, its protocol, and what a joined rank communicates in the model's place. Not
here: what ranks tell each other in every pass (:mod:`collectives.ddp.sync`).
"""

from __future__ import annotations
