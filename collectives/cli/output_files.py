"""Arguments of commands that name files to write, checked before anything is measured."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

__all__ = ["output_file", "output_folder"]


def output_file(text: str | Path) -> Path:
    """Converts an argument that names a file; makes its folder.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there.
    """
    path = Path(text)
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not there:
            path.unlink(missing_ok=True)  # another process of a launcher may have been here
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    return path


def output_folder(text: str | Path) -> Path:
    """Converts an argument that names a folder for files, which whoever writes them makes.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there.
    """
    path = Path(text)
    there = path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        if not there:
            with contextlib.suppress(OSError):  # another process of a launcher may have been here
                path.rmdir()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{str(path)!r} cannot be written to: {error.strerror}") from error
    return path
