"""Tools on the checkout itself: imports, the debugger, archives; type checkers in test_typed_programs."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LINKED = ("store", "backends", "ddp", "bench")


def run(*command: str | Path, cwd: Path = CHECKOUT, status: int = 0, **extra: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONSAFEPATH"}} | extra
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == status, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def line_of(path: str, text: str) -> int:
    """Returns the number of the line of a file that holds a text."""
    lines = (CHECKOUT / path).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


LINKS = f"""
import importlib
for name in {LINKED!r}:
    print(importlib.import_module("collectives." + name).__file__)
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(error)
"""


def test_a_linked_folder_is_one_package_by_the_path_of_its_import() -> None:
    lines = run(sys.executable, "-c", LINKS).splitlines()
    for name, file, refusal in zip(LINKED, lines[::2], lines[1::2], strict=True):
        link = CHECKOUT / "collectives" / name
        assert link.readlink() == Path("..") / name
        assert file == str(link / "__init__.py")
        assert refusal.startswith(f"this folder is the package collectives.{name}")


def test_a_breakpoint_in_a_linked_folder_stops(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from collectives.store import HashStore\nHashStore().set('key', 'value')\n")
    line = line_of("store/memory.py", "def _set(")
    stop = f"break collectives/store/memory.py:{line}"
    text = run(sys.executable, "-m", "pdb", "-c", stop, "-c", "continue", "-c", "p key", "-c", "quit", script)
    assert "'key'" in text, text


def test_an_archive_of_the_repository_holds_links_and_makes_a_complete_sdist(tmp_path: Path) -> None:
    archive = tmp_path / "archive.tar"
    if not (CHECKOUT / ".git").exists():
        pytest.skip("not a clone")
    run("git", "archive", "-o", archive, "HEAD")
    tree = tmp_path / "tree"
    with tarfile.open(archive) as tar:
        tar.extractall(tree, filter="tar")
    assert (tree / "collectives" / "store").readlink() == Path("../store")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, tree, cwd=tmp_path)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as tar:
        names = [name.split("/", 1)[1] for name in tar.getnames()]
    for name in LINKED:
        assert f"collectives/{name}/__init__.py" in names
        assert f"{name}/__init__.py" not in names, "an archive holds every file once"
    assert "collectives/backends/native/CMakeLists.txt" in names
