"""Whether a backend of ``torch.distributed`` does what it should: ``collectives conformance``.

Inside: what every operation must give (``oracle``), the calls of torch's functions (``functions``), and
what starts the ranks and finds those that hang or die (``examination``). Not here: our own tests
(``tests/conformance``).
"""

from __future__ import annotations
