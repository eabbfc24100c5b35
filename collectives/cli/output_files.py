"""Arguments of commands that name files to write, checked before anything is measured."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path


def output_file(text: str | Path) -> Path:
    """Converts an argument that names a file; makes its folder.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there.
    """
    path = Path(text)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()

    return _tried(path, write, path.unlink)


def output_folder(text: str | Path) -> Path:
    """Converts an argument that names a folder for files, which whoever writes them makes.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there.
    """
    path = Path(text)

    def write() -> None:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()

    return _tried(path, write, path.rmdir)


def _tried(path: Path, write: Callable[[], object], undo: Callable[[], object]) -> Path:
    """Returns the path once something could be written there, of which nothing is left."""
    there = path.exists()
    try:
        write()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    if not there:
        with contextlib.suppress(OSError):  # another process of a launcher may have been here
            undo()
    return path
