"""Arguments of operations: checks, the overloads that torch has, and dense stand-ins for strided tensors.

Inside: what runs in the caller's process before anything is sent. Not here: whether ranks agree in their
arguments, which backends find out as they synchronise.
"""

from __future__ import annotations
