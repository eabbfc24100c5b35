"""Sizes on the command line."""

from __future__ import annotations

import pytest

from collectives.bench.core.records import format_bytes, parse_bytes, parse_sizes


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("8B", 8), ("64k", 65536), ("64KB", 65536), ("4MiB", 4 << 20), ("1G", 1 << 30), (" 12 ", 12)],
)
def test_bytes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-8", "8X", "8 8", "0x8"])
def test_bytes_refused(text):
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", [8]),
        ("1K,8,8", [8, 1024]),
        ("8:64", [8, 16, 32, 64]),
        ("8:100", [8, 16, 32, 64]),
        ("8:1K:4", [8, 32, 128, 512]),
        ("8:16,1M", [8, 16, 1 << 20]),
    ],
)
def test_sizes(text, sizes):
    assert parse_sizes(text) == sizes


def test_sizes_of_the_demo():
    sizes = parse_sizes("8:64M")
    assert (sizes[0], sizes[-1], len(sizes)) == (8, 64 << 20, 24)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("64:8", "must ascend"),
        ("0:8", "must be positive"),
        ("8:64:1", "must ascend"),
        ("8:64:2:2", "no range"),
        ("0", "must be positive"),
        ("8:", "is no size"),
    ],
)
def test_sizes_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(8, "8 B"), (1000, "1000 B"), (65536, "64 KiB"), (3 << 20, "3 MiB"), (1 << 30, "1 GiB")],
)
def test_format(size, text):
    assert format_bytes(size) == text
    assert parse_bytes(text.replace(" ", "")) == size
