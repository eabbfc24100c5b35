"""Message sizes on the command line and in print."""

from __future__ import annotations

__all__ = ["format_bytes", "parse_bytes", "parse_sizes"]

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """Returns a number of bytes given as ``"8"``, ``"64K"``, ``"4MiB"``; K, M and G are powers of 1024.

    Raises:
        ValueError: ``text`` is no such number.
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number.lstrip("0123456789")
    digits = number.removesuffix(unit) if unit else number
    if not digits or unit not in _UNITS:
        raise ValueError(f"{text!r} is no size; write bytes with an optional K, M or G, such as 8, 64K or 4M")
    return int(digits) * _UNITS[unit]


def parse_sizes(text: str) -> list[int]:
    """Returns the message sizes of a sweep in bytes, ascending, each once.

    Args:
        text: sizes and ranges, separated by commas. A range is ``FIRST:LAST`` in powers of two,
            ``FIRST:LAST:FACTOR``, or ``FIRST:LAST:+STEP``; its end belongs to it where the steps meet it.

    Raises:
        ValueError: ``text`` cannot be read, or a range does not ascend.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        first, *rest = part.split(":")
        if not rest:
            sizes.add(parse_bytes(first))
            continue
        if len(rest) > 2:
            raise ValueError(
                f"{part!r} is no range of sizes; write FIRST:LAST, FIRST:LAST:FACTOR or FIRST:LAST:+STEP"
            )
        sizes.update(
            _range(part, parse_bytes(first), parse_bytes(rest[0]), rest[1] if len(rest) == 2 else "2")
        )
    if min(sizes) < 1:
        raise ValueError(f"sizes must be positive, but {text!r} holds {min(sizes)}")
    return sorted(sizes)


def _range(part: str, first: int, last: int, step: str) -> list[int]:
    if first < 1 or last < first:
        raise ValueError(f"range {part!r} must ascend from 1 or more, but goes from {first} to {last} bytes")
    adds = step.startswith("+")
    width = parse_bytes(step.removeprefix("+"))
    if width < (1 if adds else 2):
        raise ValueError(f"range {part!r} does not ascend: its {'step' if adds else 'factor'} is {width}")
    sizes = [first]
    while (following := sizes[-1] + width if adds else sizes[-1] * width) <= last:
        sizes.append(following)
    return sizes


def format_bytes(size: int) -> str:
    """Returns a size in the largest unit that divides it, such as ``"64 KiB"``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
