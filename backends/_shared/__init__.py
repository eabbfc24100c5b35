"""What several backends need: operations in messages, memory of tensors, the health of groups, exit reasons.

Not here: anything that only one backend uses.
"""

from __future__ import annotations
