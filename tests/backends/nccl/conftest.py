"""The double of NCCL, compiled once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def nccl_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the double; ranks load it before a provider."""
    from nccl_double import build

    if torch.version.cuda is not None:
        pytest.skip("torch is built for CUDA and has loaded NCCL, beside which no double can stand")
    return build(tmp_path_factory.mktemp("nccl_double"))
