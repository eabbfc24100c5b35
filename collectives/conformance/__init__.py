"""Whether a backend of ``torch.distributed`` does what it should: ``python -m collectives.conformance``.

:mod:`~collectives.conformance.oracle` says what every operation must give,
:mod:`~collectives.conformance.functions` calls torch's functions and compares, and
:mod:`~collectives.conformance.examination` starts the ranks and finds those that hang or die.
"""

from __future__ import annotations

__all__: list[str] = []
