"""Which package calls NCCL, and which copy of NCCL it calls."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from harness import run_ranks
from nccl_double import NcclDouble
from nccl_double.groups import PROVIDERS, shared_id

from collectives import DistBackendError
from collectives.backends.nccl import providers
from collectives.backends.nccl.libnccl import NcclConfig
from collectives.backends.nccl.providers import loaded_files

pytestmark = [mark for provider in PROVIDERS for mark in provider.marks]


def alone(function: object, *args: object, **env: str) -> None:
    """Runs a function in a process of its own, which ends with it."""
    unset = {providers.PROVIDER_VARIABLE: None, "NUMBA_NCCLLIB": None}
    run_ranks(function, 1, *args, isolated=True, env={**unset, **env})


def first_of_both(rank: int, size: int, path: Path) -> None:
    NcclDouble(path)
    library = providers.load()
    assert library.name == "cupy"
    assert providers.load("CuPy") is library
    assert providers.unavailable("pynccl") is None
    assert providers.load("pynccl").path == library.path == str(path)
    assert len(loaded_files()) == 1
    assert re.fullmatch(r"NCCL 2\.\d+\.\d+ by way of cupy \d+\.\d.*", providers.describe())
    assert re.fullmatch(r"NCCL 2\.\d+\.\d+ by way of pynccl \d+\.\d.*", providers.describe("pynccl"))
    with pytest.raises(ValueError, match="one of cupy, pynccl, but is 'gloo'"):
        providers.load("gloo")


def chosen_by_environment(rank: int, size: int, path: Path) -> None:
    NcclDouble(path)
    assert providers.load().name == "pynccl"
    assert providers.load("cupy").name == "cupy", "what the program says counts more"
    os.environ[providers.PROVIDER_VARIABLE] = "nccl4py"
    assert "COLLECTIVES_NCCL_PROVIDER must be one of" in str(providers.unavailable())


def test_cupy_comes_first(nccl_library: Path) -> None:
    alone(first_of_both, nccl_library)


def test_the_environment_chooses(nccl_library: Path) -> None:
    alone(chosen_by_environment, nccl_library, COLLECTIVES_NCCL_PROVIDER="pynccl")


def without_packages(rank: int, size: int, path: Path) -> None:
    NcclDouble(path)
    for name in ("cupy", "pynccl"):
        sys.modules[name] = None  # as if it were not installed
    with pytest.raises(DistBackendError, match="no provider of NCCL") as caught:
        providers.load()
    text = str(caught.value)
    assert "cupy: CuPy is not installed; install it with: pip install 'torch-collectives[cuda" in text
    assert "pynccl: pynccl is not installed; install it with: pip install 'torch-collectives[cuda" in text
    assert str(providers.unavailable("pynccl")).startswith(
        "NCCL cannot be used by way of pynccl: pynccl is not"
    )


def test_without_packages(nccl_library: Path) -> None:
    alone(without_packages, nccl_library)


def without_library(rank: int, size: int) -> None:
    reason = providers.unavailable()
    if reason is None:
        pytest.skip("NCCL is installed here")
    assert "finds no libnccl.so.2; install one with: pip install" in reason
    assert "finds no usable libnccl.so.2" in reason
    assert "NUMBA_NCCLLIB" not in os.environ


def test_without_library() -> None:
    alone(without_library)


def test_two_copies_are_refused(nccl_library: Path, tmp_path: Path) -> None:
    alone(two_copies, nccl_library, shutil.copy(nccl_library, tmp_path))


def test_a_second_copy_is_not_opened(nccl_library: Path, tmp_path: Path) -> None:
    shutil.copy(nccl_library, tmp_path)
    alone(second_copy, nccl_library, NUMBA_NCCLLIB=str(tmp_path))


def test_the_users_folder(nccl_library: Path) -> None:
    alone(users_folder, nccl_library, NUMBA_NCCLLIB=str(nccl_library.parent))


def test_the_wheel_of_nvidia(nccl_library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    shutil.copy(nccl_library, folder)
    alone(wheel_of_nvidia, tmp_path)


def test_a_library_of_another_name(nccl_library: Path, tmp_path: Path) -> None:
    shutil.copy(nccl_library, tmp_path / "renamed.so")
    (tmp_path / "libnccl.so.2").symlink_to("renamed.so")
    alone(library_of_another_name, NUMBA_NCCLLIB=str(tmp_path))


def test_versions(nccl_library: Path) -> None:
    alone(versions, nccl_library, COLLECTIVES_NCCL_PROVIDER="pynccl")


def two_copies(rank: int, size: int, path: Path, other: str) -> None:
    NcclDouble(path)
    ctypes.CDLL(other)
    for provider in providers.PROVIDERS:
        reason = str(providers.unavailable(provider))
        assert "2 different copies of NCCL are loaded" in reason
        assert str(path) in reason
        assert other in reason


def second_copy(rank: int, size: int, path: Path) -> None:
    NcclDouble(path)
    reason = str(providers.unavailable("pynccl"))
    assert f"pynccl would open {os.environ['NUMBA_NCCLLIB']}/libnccl.so.2" in reason
    assert f"this process has loaded {path}" in reason
    assert loaded_files() == [str(path)]
    assert providers.load().name == "cupy", "the other one can still be used"


def users_folder(rank: int, size: int, path: Path) -> None:
    assert loaded_files() == []
    assert providers.load("pynccl").path == str(path)


def wheel_of_nvidia(rank: int, size: int, site: Path) -> None:
    sys.path.insert(0, str(site))
    assert providers.load("pynccl").path == str(site / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    assert "NUMBA_NCCLLIB" not in os.environ, "the user's processes are not led"


def library_of_another_name(rank: int, size: int) -> None:
    reason = str(providers.unavailable("pynccl"))
    assert "libnccl.so.2, which is no libnccl.so; look at NUMBA_NCCLLIB" in reason


def versions(rank: int, size: int, path: Path) -> None:
    double = NcclDouble(path)
    double.set_version(2708)
    assert "is NCCL 2.7.8, but 2.14.0 is needed" in str(providers.unavailable())
    assert "is NCCL 2.7.8, but 2.14.0 is needed" in str(providers.unavailable("cupy"))
    double.set_version(22005)
    library = providers.load()
    with pytest.raises(ValueError, match=r"traffic_class=1 needs NCCL 2\.26\.0, but .* is NCCL 2\.20\.5"):
        library.init(shared_id(library, rank), size, rank, NcclConfig(traffic_class=1))
    library.init(shared_id(library, rank), size, rank, NcclConfig(max_ctas=1)).abort()
