"""The examples of docs/examples/frameworks work over this package as over Gloo, bit for bit.

Each runs by the line that says how, with the backend named in place of the default. They are compared by
the file that rank 0 writes before it ends. Nothing is asked of how programs over torch's own Gloo end. Some
end by ``std::terminate`` after their last line. Some hang, where the last reference to the group goes with
the wrapper's reducer: its destructor joins a thread of Gloo's with the GIL held, and the thread may be
waiting for the GIL to release a Python object. Ours end with status 0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

pytestmark = pytest.mark.usefixtures("preloaded_python")

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "frameworks"
LIMIT_S = 300
END_S = 10
"""How long a program over Gloo may take from its result to its end, before it is ended."""

PROGRAMS = {
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "python": [],
    "torchrun": ["-m", "torch.distributed.run"],
}
"""What follows the interpreter in place of a program's name."""

NEEDS = {
    "accelerate_launch": "accelerate",
    "accelerate_notebook": "accelerate",
    "data_loader": "torch",
    "deepspeed_generate": "deepspeed transformers",
    "deepspeed_zero": "deepspeed",
    "distributed_checkpoint": "torch",
    "ignite_idist": "ignite",
    "lightning_ddp": "lightning",
    "lightning_fabric": "lightning",
    "lightning_sharded": "lightning",
    "ray_train": "ray",
    "torch_metrics": "torchmetrics",
    "transformers_generate": "transformers accelerate",
    "transformers_trainer": "transformers accelerate",
}
"""By example, the packages that it imports."""

OURS = [
    ("accelerate_launch", ""),
    ("accelerate_launch", "--ddp collectives"),
    ("accelerate_notebook", ""),
    ("transformers_trainer", ""),
    ("transformers_generate", ""),
    ("lightning_ddp", ""),
    ("lightning_ddp", "--start spawn"),
    ("lightning_ddp", "--start fork"),
    ("lightning_ddp", "--ddp collectives"),
    ("lightning_ddp", "--ddp collectives --manual"),
    ("lightning_fabric", ""),
    ("lightning_sharded", ""),
    ("ignite_idist", ""),
    ("ignite_idist", "--ddp collectives"),
    ("ray_train", ""),
    ("ray_train", "--ddp collectives"),
    ("deepspeed_generate", ""),
    ("deepspeed_zero", ""),
    ("deepspeed_zero", "--stage 3"),
    ("torch_metrics", ""),
    ("distributed_checkpoint", ""),
    ("data_loader", ""),
]
"""Examples, and what they are given."""


def need(example: str) -> None:
    missing = [package for package in NEEDS[example].split() if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here; the page of frameworks says how to install it")


def command_of(example: str) -> list[str]:
    text = (EXAMPLES / f"{example}.py").read_text("utf-8")
    program, *rest = shlex.split(re.search(r"Run with: (.+)", text).group(1))
    return [sys.executable, *PROGRAMS[program], *rest]


@contextlib.contextmanager
def started(example: str, options: str, result: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts an example with a file for its result in an empty folder, and ends what is left of it."""
    result.parent.mkdir(parents=True)
    # Sockets of torch's data loaders lie in it, whose names must be short.
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": scratch,
            "HF_HUB_OFFLINE": "1",
            # Lightning imports mpi4py where it is installed, and with that begins an MPI of one rank, which
            # leaves shared memory behind.
            "OMPI_MCA_btl_sm_backing_directory": scratch,
            "RAY_TMPDIR": scratch,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [*command_of(example), *shlex.split(options), "--result", str(result)]
        with subprocess.Popen(
            command, cwd=EXAMPLES, env=environment, stdout=PIPE, stderr=PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.terminate()  # torchrun ends its ranks
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.communicate(timeout=40)
                    process.kill()


@functools.cache
def over_gloo(example: str, options: str, folder: Path) -> dict[str, object]:
    """Returns what torch's wrapper over Gloo writes; how its program ends after that is torch's affair."""
    result = folder / "result.json"
    said = None
    with started(example, f"{options} --backend gloo", result) as process:
        deadline = time.monotonic() + LIMIT_S
        while said is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=1)
            if result.exists():
                deadline = min(deadline, time.monotonic() + END_S)
    assert result.exists(), said
    return json.loads(result.read_text("utf-8"))


@pytest.fixture(scope="module")
def gloo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gloo")


def test_every_example_runs() -> None:
    assert {example for example, _ in OURS} == set(NEEDS)
    elsewhere = {"torchft_train", "vllm_generate"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS) | elsewhere | {"tiny"}


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S + 30)
@pytest.mark.parametrize(("example", "options"), OURS, ids=[" ".join(case).strip() for case in OURS])
def test_works_as_over_gloo(
    example: str, options: str, tmp_path: Path, gloo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(example)
    # On CPUs, DeepSpeed compiles a part of its own where it finds none in this folder.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(gloo_folder / "torch_extensions"))
    result = tmp_path / "ours" / "result.json"
    with started(example, options, result) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + err
    # Ray tells before each line of a rank whose it is.
    assert re.search(r"^(.*\(RayTrainWorker .*\)\S* )?worked: ", out, re.MULTILINE), out + err
    plain = options.replace("--ddp collectives", "").strip()
    reference = over_gloo(example, plain, gloo_folder / f"{example} {plain}".replace(" ", "_"))
    assert json.loads(result.read_text("utf-8")) == reference
