"""Reports of ``collectives bench allreduce``, read back from their JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from collectives.bench.allreduce import Record, Report
from collectives.bench.core.records import Skipped, Timing


def read_report(path: Path) -> Report:
    """Returns the report in a file; what is no report raises."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    assert plain["schema"] == Report.SCHEMA
    records = [_record(entry) for entry in plain["records"]]
    skipped = [Skipped(**entry) for entry in plain["skipped"]]
    return Report(plain["program"], plain["environment"], plain["options"], records, skipped)


def _record(plain: dict[str, Any]) -> Record:
    timings = {
        name: Timing(**{key: plain[name][key] for key in Timing.__slots__})
        for name in ("cold", "hot", "loop", "host")
        if plain[name] is not None
    }
    return Record(**{**plain, **timings})
