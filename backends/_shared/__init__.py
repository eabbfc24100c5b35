"""What several backends need: operations in messages, memory of tensors, process records, exit reasons.

Not here: anything that only one backend uses.
"""

from __future__ import annotations
