"""docs/guide/environment.md names the environment variables that are read, and no others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "environment.md"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]

_PREFIXES = "COLLECTIVES|CUDA|GLOO|LOCAL|MASTER|NCCL|NUMBA|TORCH|WORLD|XDG"
VARIABLE = re.compile(rf"(?<!-D)(?:{_PREFIXES})_[A-Z0-9_]+")  # -D: options of CMake

BY_TORCH = {"TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_FR_DUMP_TEMP_FILE"}
"""What torch reads, and changes what users of this package see."""
BY_NCCL = {
    "NCCL_CROSS_NIC",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
}
SHOWN_ONLY = {"GLOO_DEVICE_TRANSPORT", "NCCL_IB_TIMEOUT", "NCCL_NTHREADS"}
"""What DDP's logging data repeat, because torch's do."""


def literals(path: Path) -> set[str]:
    """Returns the strings that look like names of variables, of a source that reads the environment."""
    text = path.read_text("utf-8")
    if not re.search(r"os\.environ\b|getenv\(", text):
        return set()
    # Keys of dicts with NCCL's variables are what ranks get.
    found = re.findall(r'"((?!NCCL_[A-Z0-9_]+":)[A-Z0-9_]+)"', text)
    return {name for name in found if VARIABLE.fullmatch(name)}


def variables_read() -> set[str]:
    """Returns the variables that the package reads, apart from those by which launchers tell of a job."""
    sources = [
        path
        for folder in ("collectives", "store", "backends", "ddp")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".hpp"} and path.parent != ROOT / "backends" / "native" / "tests"
    ]
    return set().union(*map(literals, sources)) - SHOWN_ONLY


def listed() -> set[str]:
    """Returns the variables of the page's table."""
    cells = re.findall(r"^\| (`.*?) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name for cell in cells for name in VARIABLE.findall(cell)}


def test_what_is_read_is_listed() -> None:
    read = variables_read()
    assert {"COLLECTIVES_SOCKET_IFNAME", "COLLECTIVES_HOST_STREAMS", "MASTER_ADDR"} <= read
    assert sorted(read - listed() - BY_NCCL) == []


def test_what_is_listed_is_read() -> None:
    assert sorted(listed() - variables_read() - BY_TORCH) == []


def test_pages_name_variables_that_exist() -> None:
    known = listed() | BY_NCCL
    found = {
        str(page.relative_to(ROOT)): sorted(set(VARIABLE.findall(page.read_text("utf-8"))) - known)
        for page in PAGES
    }
    assert {page: names for page, names in found.items() if names} == {}
