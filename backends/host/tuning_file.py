"""Thresholds of the host backend, as a file that the environment names.

They decide how an operation is carried out, and never change a bit of its result. Rank 0 reads them when it
forms a group, and hands them to all ranks. The file maps sizes of groups to thresholds, as JSON::

    {"2": {"one_shot_bytes": 65536, "spin_us": 50}, "4": {"ring_bytes": 524288}}

A group takes the entry of the largest size that is not above its own, and the defaults where it is smaller
than all. An entry may leave out fields; ``FIELDS`` lists them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import collectives._native as _native

VARIABLE = "COLLECTIVES_TUNING"
"""Environment variable with the path of the file; unset or empty: the defaults."""

FIELDS: Mapping[str, tuple[int, int, int, str]] = _native.TUNING_FIELDS
"""Name of each threshold: least and most value, what it must be a multiple of, and what it means."""


def defaults(size: int) -> dict[str, int]:
    """Returns every threshold of a group of ``size`` that no file speaks of."""
    return _native.complete_tuning({}, size)


def tuning_for(size: int) -> dict[str, int]:
    """Returns every threshold of a group of ``size``: those of the file, or the defaults.

    Warns, and returns the defaults, where the file cannot be used.
    """
    file = os.environ.get(VARIABLE)
    if not file:
        return defaults(size)
    try:
        return _native.complete_tuning(_entry(Path(file), size), size)
    except (OSError, ValueError, TypeError) as error:
        # TypeError: the core was given something other than numbers.
        reason = str(error).split("\n", maxsplit=1)[0]
        warnings.warn(
            f"the host backend uses its default thresholds, because {file} cannot be used: {reason}; "
            f"mend it, or unset {VARIABLE}",
            stacklevel=2,
        )
        return defaults(size)


def _entry(file: Path, size: int) -> Mapping[str, int]:
    entries: Any = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(entries, dict) or not all(key.isdecimal() for key in entries):
        raise ValueError("it does not map sizes of groups to thresholds")
    for key, entry in entries.items():
        if not isinstance(entry, dict):
            raise ValueError(f"the thresholds of {key} ranks are no table")
    fitting = [key for key in entries if int(key) <= size]
    return entries[max(fitting, key=int)] if fitting else {}
