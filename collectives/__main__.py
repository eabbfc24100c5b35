"""``python -m collectives``, the same as the command ``collectives``."""

from __future__ import annotations

from collectives.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
