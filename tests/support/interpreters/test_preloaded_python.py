"""The stand-in for the interpreter does what an interpreter does, in a process that has torch loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("preloaded_python")

LOADED = "import sys; print('torch._dynamo' in sys.modules)"


def run(*words, status=0, **options):
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)
    assert done.returncode == status, done.stderr
    return done.stdout


def test_torch_is_loaded():
    assert run("-c", LOADED) == "True\n"


def test_torch_is_not_loaded_where_a_test_wants_that(fresh_python):
    assert run("-c", LOADED) == "False\n"


@pytest.mark.parametrize("words", [["-X", "dev"], ["-W", "once"], ["-I"], ["-B"]], ids="".join)
def test_options_that_a_fork_cannot_heed_take_a_new_one(words):
    assert run(*words, "-c", LOADED) == "False\n"


@pytest.mark.parametrize("variable", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "TORCH_LOGS"])
def test_variables_that_a_fork_cannot_heed_take_a_new_one(variable, monkeypatch):
    monkeypatch.setenv(variable, {"TORCH_LOGS": "recompiles"}.get(variable, "3"))
    assert run("-c", LOADED) == "False\n"


def test_another_network_namespace_takes_a_new_one():
    command = ["unshare", "--net", sys.executable, "-c", LOADED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
    assert done.stdout == "False\n"


def test_one_that_is_killed_at_once_harms_no_other():
    for delay in (0.0, 0.01, 0.02, 0.04, 0.08):
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            time.sleep(delay)
            process.kill()
    assert run("-c", LOADED) == "True\n"


def test_a_script_finds_its_words_folder_neighbours_and_environment(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("import of_the_path\nvalue = of_the_path.value\n")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "of_the_path.py").write_text("value = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, beside, __main__\n"
        "print(sys.argv[1:], beside.value, os.getcwd(), os.environ['ONLY_HERE'], __name__)\n"
        "print(os.path.basename(__file__), 'NOT_HERE' in os.environ, __main__.beside is beside)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    said = run(script, "a b", "-c", cwd="/", env={**os.environ, "ONLY_HERE": "yes"}).splitlines()
    assert said == ["['a b', '-c'] 7 / yes __main__", "script.py False True"]


def test_a_module_and_a_text():
    assert run("-m", "platform", "--terse").strip()
    assert run("-c", "import sys; print(sys.argv)", "x", "-y") == "['-c', 'x', '-y']\n"


def test_open_files_and_no_others_are_there(tmp_path):
    with (tmp_path / "file").open("w") as file:
        code = f"import os; os.write({file.fileno()}, b'there'); print(len(os.listdir('/proc/self/fd')))"
        assert run("-c", code, pass_fds=[file.fileno()], input="") == "5\n"  # one is that of the listing
    assert (tmp_path / "file").read_text() == "there"
    assert run("-c", "print(input())", input="of the pipe\n") == "of the pipe\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
    ],
)
def test_the_end_is_that_of_the_process(code, status):
    run("-c", code, status=status)


WAITING = """
import os, signal, sys, time
exec(sys.argv[1])
print(os.getpid(), flush=True)
for _ in range(600):
    time.sleep(0.1)  # a signal that comes right before one is answered after it
"""


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        (signal.SIGTERM, "", -signal.SIGTERM),
        (signal.SIGINT, "signal.signal(2, lambda *_: os._exit(7))", 7),
        (signal.SIGKILL, "", -signal.SIGKILL),
    ],
)
def test_signals_reach_the_process(number, code, status):
    command = [sys.executable, "-c", WAITING, code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=30) == status
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until, "it outlives the one who asked for it"
        time.sleep(0.01)
