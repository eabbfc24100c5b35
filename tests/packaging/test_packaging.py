"""The package as users get it: sdist, wheel, normal and editable install, in the checkout and outside it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(600)  # the C++ core is compiled once, on however busy a machine

CHECKOUT = Path(__file__).resolve().parents[2]

PARTS = ", ".join(f"collectives{part}" for part in ("", ".store", ".backends", ".ddp", ".bench", "._native"))

SPAWNING_SCRIPT = f"""
import tempfile
import torch
import torch.multiprocessing as mp
import {PARTS}
import backends, store, ddp, bench

def rank_main(rank, path):
    collectives.init_process_group("host", init_method=f"file://{{path}}", rank=rank, world_size=2)
    t = torch.full((3,), rank + 1.0)
    collectives.all_reduce(t)
    assert t.tolist() == [3.0] * 3, t
    collectives.destroy_process_group()
    mine = " ".join(one.MINE for one in (backends, store, ddp, bench))
    print(mine + "\\n", end="", flush=True)  # in one write

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(f"{{folder}}/store",), nprocs=2)
"""

TORCHRUN_SCRIPT = """
import torch
import collectives as dist

assert dist.is_torchelastic_launched()
for life in range(2):
    dist.init_process_group()
    t = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(t)
    assert t.tolist() == [3.0] * 3, t
    assert dist.get_node_local_rank() == dist.get_rank()
    dist.destroy_process_group()
print("launched rank agrees")
"""


def run(*command: str | Path, cwd: Path, **extra: str) -> str:
    """Runs a command without this process's PYTHONPATH; returns its output, which a failure shows."""
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONSAFEPATH"}}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **extra}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, CHECKOUT, cwd=out)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip")
    # What is in the wheel matters here, not its speed.
    quick = "--config-settings=cmake.build-type=None"
    # pip unpacks into another folder each time, which is the same to ccache where paths are relative.
    cached = {"CCACHE_BASEDIR": "/", "CCACHE_NOHASHDIR": "1"}
    if shutil.which("ccache") is not None:
        cached["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", quick, "-w", out, sdist, cwd=out, **cached)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel; torch and the like are those of the tests."""
    home = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    shared = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(Path(torch.__file__).parents[1]),
    }
    (site / "of_the_tests.pth").write_text("\n".join(sorted(shared)))
    return python


@pytest.fixture(params=["normal", "editable"])
def installed_so(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """An interpreter that sees the package, and the working folder where that is harder.

    Installed from the wheel, beside the folders of the checkout; as the tests themselves see it, elsewhere.
    """
    if request.param == "normal":
        return request.getfixturevalue("installed"), CHECKOUT
    return Path(sys.executable), tmp_path


def test_sdist_holds_the_sources_and_no_build_products(sdist: Path) -> None:
    assert sdist.name.startswith("torch_collectives-")
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    for wanted in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "collectives/backends/native/CMakeLists.txt",
        "tests/",
    ):
        assert any(name.startswith(wanted) for name in names), wanted
    assert not [name for name in names if name.startswith(("build/", "dist/", ".venv"))]
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_holds_the_packages_without_sources_of_the_core(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {
        "collectives",
        "collectives_registration",
    }
    assert "collectives/py.typed" in names
    assert "collectives/_native.pyi" in names
    for part in ("store", "backends", "ddp", "bench"):
        assert f"collectives/{part}/__init__.py" in names
    assert len([name for name in names if name.endswith(".so")]) == 1
    assert not [name for name in names if name.endswith((".cpp", ".hpp", "CMakeLists.txt"))]


def test_commands_that_are_printed_name_the_distribution_and_its_extras() -> None:
    extras = set(importlib.metadata.metadata("torch-collectives").get_all("Provides-Extra"))
    found = [
        (str(path), *named)
        for folder in ("backends", "bench", "collectives", "ddp", "docs", "store")
        for path in (CHECKOUT / folder).rglob("*")
        if path.suffix in {".py", ".md"}
        for named in re.findall(r"pip install .*?'([\w-]+)\[([\w,]+)\]'", path.read_text("utf-8"))
    ]
    assert len(found) > 2
    wrong = [one for one in found if one[1] != "torch-collectives" or not set(one[2].split(",")) <= extras]
    assert not wrong


def test_command(installed_so: tuple[Path, Path]) -> None:
    python, folder = installed_so
    assert "host" in run(python.parent / "collectives", "backends", cwd=folder)


def test_torchrun(installed_so: tuple[Path, Path], tmp_path: Path) -> None:
    python, folder = installed_so
    script = tmp_path / "launched.py"
    script.write_text(TORCHRUN_SCRIPT)
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run(*torchrun, script, cwd=folder)
    assert text.count("launched rank agrees") == 2


def test_spawned_ranks_of_a_script_beside_folders_of_the_same_names(
    installed_so: tuple[Path, Path], tmp_path: Path
) -> None:
    """The names store, backends, ddp and bench stay the user's."""
    python, folder = installed_so
    for name in ("store", "backends", "ddp", "bench"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MINE = '{name}'\n")
    script = tmp_path / "main.py"
    script.write_text(SPAWNING_SCRIPT)
    assert run(python, script, cwd=folder).count("backends store ddp bench") == 2
