"""A TCP store's server in a process of its own, whose memory or descriptors a test may take away."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import preloaded_python

_SCRIPT = """
import ast, os, resource, sys
from collectives.store import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True)
print(store.port, os.getpid(), flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


class StoreServer:
    """Handle on the process."""

    def __init__(self, process):
        self._process = process
        self.port, self._pid = map(int, process.stdout.readline().split())

    def evaluate(self, expression):
        """Returns the text of what a Python expression is in the server's process; ``store`` is its store."""
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def limit(self, resource, soft):
        """Sets a resource limit, ``RLIMIT_AS`` for example."""
        expression = (
            f"resource.setrlimit(resource.{resource}, ({soft}, resource.getrlimit(resource.{resource})[1]))"
        )
        assert self.evaluate(expression) == "None"

    def memory(self, name):
        """Returns a line of its ``/proc/PID/status`` in bytes, such as ``VmHWM``: most memory so far."""
        for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise KeyError(name)


@contextmanager
def store_server(**environment):
    """Starts a server; it ends with the block, in which it must not have died."""
    with subprocess.Popen(
        [preloaded_python.executable(), "-c", _SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)} | environment,
    ) as process:
        try:
            yield StoreServer(process)
            assert process.poll() is None, "the server's process has died"
        finally:
            process.kill()
