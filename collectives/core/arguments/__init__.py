"""Arguments of operations: checks, the overloads that torch has, and dense stand-ins for strided tensors.

Everything here runs before anything is sent.
"""

from __future__ import annotations

__all__: list[str] = []
