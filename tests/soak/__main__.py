"""Random operations and faults for as long as asked; see docs/internals/contributing.md.

::

    python tests/soak --minutes 60 --seed 1
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:1] = [str(Path(__file__).resolve().parents[1] / "support")]
    from sources import IMPORTED_FROM

    sys.path[:1] = map(str, IMPORTED_FROM)
    import harness
    import preloaded_python
    from soak.driver import main

    try:
        status = main()
    finally:
        harness.close()
        preloaded_python.stop()
    sys.exit(status)
