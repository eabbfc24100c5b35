"""What communication hooks are made of: codecs, error feedback, gathering, state.

Not here: the hooks themselves, which users register.
"""

from __future__ import annotations
