"""Folders of a session that was killed are removed by the next one, and those in use are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import folders
from sources import PYTHONPATH

MAKER = """
import signal, sys
from folders import Folder
made = Folder("killed")
print(made.path, flush=True)
signal.pause()
"""


def test_folders_of_the_dead_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    search = os.pathsep.join([str(Path(folders.__file__).parent), PYTHONPATH])
    environment = {**os.environ, "PYTHONPATH": search, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, env=environment) as maker:
        try:
            assert maker.stdout is not None
            theirs = tmp_path / maker.stdout.readline().decode().strip()
            with folders.Folder("ours") as ours:
                for path in (ours, theirs):
                    os.utime(path, (0, 0))
                folders.sweep()
                assert ours.is_dir()
                assert theirs.is_dir()
        finally:
            maker.send_signal(signal.SIGKILL)
    assert not ours.exists()
    folders.sweep()
    assert not theirs.exists()
