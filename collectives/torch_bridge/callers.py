"""Which callers of a group ask nothing of the Work of a synchronous operation.

The functions of ``torch.distributed`` wait for it and drop it. To make a Work and let it go takes 0.5 us, and
several after an operation on a megabyte, which drives torch's code and data out of the processor's caches; so
all these calls can share one. Everyone else may ask for the outputs. The arguments do not tell who calls; the
caller's frame does.
"""

from __future__ import annotations

import inspect
from types import CodeType

from torch.distributed import distributed_c10d

__all__ = ["SETS_LIMIT"]

_NAMES = (
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_into_tensor", "all_gather_single",
    "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
)  # fmt: skip


def _codes() -> list[CodeType]:
    """Returns the codes of the functions without what decorates them; this torch may lack some."""
    functions = [getattr(distributed_c10d, name, None) for name in _NAMES]
    return [inspect.unwrap(function).__code__ for function in functions if inspect.isfunction(function)]


_CODES = _codes()  # held, so that no other object gets one's identity

SETS_LIMIT = {id(code): "timeout" in code.co_names for code in _CODES}
"""Whether such a function may set a time limit in its option record, by ``id()`` of its code.

A record that cannot have one need not be asked. The hash of a code would take longer than all else.
"""
