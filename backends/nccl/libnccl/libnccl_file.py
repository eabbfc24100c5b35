"""Where the file of NCCL is found, and which one this process has loaded, of which there may be only one.

Communicators, errors and group state belong to a copy of the library. torch, CuPy and pynccl each look for
one in their own way, and two copies in a process would know nothing of each other.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = [
    "LoadedFile",
    "ProviderError",
    "find_folder",
    "install_command",
    "loaded_files",
    "the_loaded_file",
]

_NAME = re.compile(r"libnccl\.so(\.\d+)*$")


class ProviderError(RuntimeError):
    """A provider cannot be used here; the message tells why and what would mend it."""


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A copy of NCCL that is mapped into this process.

    Attributes:
        path: its file, as it was opened.
        identity: device and inode, equal for all names of the same file.
    """

    path: str
    identity: tuple[str, str]


def loaded_files() -> list[LoadedFile]:
    """Returns the different copies of NCCL that are mapped into this process."""
    found: dict[tuple[str, str], LoadedFile] = {}
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and _NAME.search(parts[5].removesuffix(" (deleted)")):
            identity = (parts[3], parts[4])
            found.setdefault(identity, LoadedFile(parts[5], identity))
    return list(found.values())


def the_loaded_file() -> LoadedFile | None:
    """Returns the copy of NCCL that is mapped into this process, ``None`` before there is one.

    Raises:
        ProviderError: there are several.
    """
    found = loaded_files()
    if len(found) > 1:
        raise ProviderError(
            f"{len(found)} different copies of NCCL are loaded in this process: "
            f"{', '.join(file.path for file in found)}; let LD_LIBRARY_PATH, NUMBA_NCCLLIB and the installed "
            "packages lead to the same one (that of torch comes first where torch is built for CUDA)"
        )
    return found[0] if found else None


def find_folder() -> Path | None:
    """Returns the folder of the copy that is loaded, else of NVIDIA's wheel, else of the system's.

    To find the system's, it loads that. ``None`` where there is none.

    Raises:
        ProviderError: several copies are loaded.
    """
    loaded = the_loaded_file()
    if loaded is None:
        if (wheel := _wheel_folder()) is not None:
            return wheel
        try:
            ctypes.CDLL("libnccl.so.2")
        except OSError:
            return None
        loaded = the_loaded_file()
    return Path(loaded.path).parent if loaded is not None else None


def _wheel_folder() -> Path | None:
    """Returns the folder with the library of NVIDIA's wheel nvidia-nccl-cu12 or -cu13, if there is one."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of NVIDIA's at all
        return None
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if list(Path(place, "lib").glob("libnccl.so.*")):
            return Path(place, "lib")
    return None


def install_command(provider: str) -> str:
    """Returns the command that installs what a provider needs, for the CUDA that torch is built for."""
    cuda = torch.version.cuda
    extra = "cuda12" if cuda is not None and cuda.startswith("12.") else "cuda13"
    return f"pip install 'torch-collectives[{extra if provider == 'cupy' else f'{extra},pynccl'}]'"
