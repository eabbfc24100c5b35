"""``python -m collectives``, the same as the command ``collectives``."""

from __future__ import annotations

from collectives.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
