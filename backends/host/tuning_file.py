"""Thresholds of the host backend for this machine, kept in a file.

They decide how an operation is carried out, and never change a bit of its result. Rank 0 reads them when it
forms a group, and hands them to all ranks. A file holds, as JSON::

    {"format": 1, "machine": "...", "ranks": {"2": {"one_shot_bytes": 65536, ...}, "4": {...}}}

``machine`` is what :func:`machine` returns where they were measured. ``ranks`` has an entry for each size of
group that was measured; a group takes the entry of the largest size that is not above its own, and the
defaults where it is smaller than all. An entry may leave out fields; ``FIELDS`` lists them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import collectives._native as _native

__all__ = ["FIELDS", "VARIABLE", "defaults", "fits", "machine", "path", "save", "stored", "tuning_for"]

VARIABLE = "COLLECTIVES_TUNING"
"""Environment variable with the path of the file; empty: none, not even that of the user's cache folder."""

FIELDS: Mapping[str, tuple[int, int, int, str]] = _native.TUNING_FIELDS
"""Name of each threshold: least and most value, what it must be a multiple of, and what it means."""

_FORMAT = 1


def machine() -> str:
    """Returns what tells kinds of machines apart: processor, number of processors, architecture."""
    model = platform.processor() or "unknown processor"
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            model = next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
            )
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} processors, {platform.machine()}"


def path() -> Path | None:
    """Returns where this machine's file is, or would be; ``None`` where the variable is empty."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(folder) if folder else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return base / "collectives" / f"tuning-{hashlib.sha256(machine().encode()).hexdigest()[:16]}.json"


def defaults(size: int) -> dict[str, int]:
    """Returns every threshold of a group of ``size`` that no file speaks of."""
    return _native.complete_tuning({}, size)


def tuning_for(size: int) -> dict[str, int]:
    """Returns every threshold of a group of ``size``: this machine's, or the defaults.

    Warns, and returns the defaults, where the file cannot be used. No file is no reason to warn, unless the
    environment names it.
    """
    file = path()
    if file is None or (VARIABLE not in os.environ and not file.exists()):
        return defaults(size)
    try:
        return _native.complete_tuning(_entry(file, size), size)
    except (OSError, ValueError, TypeError) as error:
        # TypeError: the core was given something other than numbers.
        reason = str(error).split("\n", maxsplit=1)[0]
        warnings.warn(
            f"the host backend uses its default thresholds, because {file} cannot be used: {reason}; measure "
            f"them again with `collectives tune`, or set {VARIABLE} to nothing",
            stacklevel=2,
        )
        return defaults(size)


def fits(values: Mapping[str, int], size: int) -> bool:
    """Returns whether groups of a size accept thresholds together, beside the defaults of the others."""
    try:
        _native.complete_tuning(values, size)
    except ValueError:
        return False
    return True


def save(ranks: Mapping[int, Mapping[str, int]], file: Path | None = None) -> Path:
    """Writes thresholds by size of group for this machine, at once or not at all; returns where.

    Args:
        ranks: for each size of group measured, its thresholds.
        file: where; ``None`` for the place where :func:`tuning_for` looks.

    Raises:
        ValueError: a threshold is unknown or out of bounds, or the environment says that there is no file.
        OSError: the file cannot be written.
    """
    for size, values in ranks.items():
        _native.complete_tuning(values, size)
    file = file or path()
    if file is None:
        raise ValueError(f"{VARIABLE} is empty, so that thresholds are kept nowhere")
    content = {
        "format": _FORMAT,
        "machine": machine(),
        "ranks": {str(size): dict(values) for size, values in sorted(ranks.items())},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(file)
    return file


def stored(file: Path) -> dict[int, dict[str, int]]:
    """Returns what a file of this machine holds, by size of group.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be used here.
    """
    return {int(size): dict(values) for size, values in _entries(file).items()}


def _entry(file: Path, size: int) -> Mapping[str, int]:
    entries = _entries(file)
    fitting = [int(key) for key in entries if int(key) <= size]
    return entries[str(max(fitting))] if fitting else {}


def _entries(file: Path) -> dict[str, dict[str, int]]:
    content: Any = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"it is no file of thresholds of format {_FORMAT}")
    if content.get("machine") != machine():
        raise ValueError(f"it was measured on {content.get('machine')!r}, and this is {machine()!r}")
    entries = content.get("ranks")
    if not isinstance(entries, dict) or not all(key.isdecimal() for key in entries):
        raise ValueError("'ranks' does not map sizes of groups to thresholds")
    for key, entry in entries.items():
        if not isinstance(entry, dict):
            raise ValueError(f"the thresholds of {key} ranks are no table")
    return entries
