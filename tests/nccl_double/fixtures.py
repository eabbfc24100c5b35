"""The double of NCCL as a fixture, compiled where it has changed, and a provider that loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def nccl_library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the double; ranks load it before a provider."""
    from nccl_double import build

    if torch.version.cuda is not None:
        pytest.skip("torch is built for CUDA and has loaded NCCL, beside which no double can stand")
    if pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        return build(pytestconfig.cache.mkdir("nccl_double"))
    base = tmp_path_factory.getbasetemp()
    return build(base.parent if hasattr(pytestconfig, "workerinput") else base)


@pytest.fixture
def provider() -> str:
    """The provider of tests in which it makes no difference: all call NCCL by its own functions."""
    from nccl_double.groups import PROVIDERS

    return next((str(name) for one in PROVIDERS for name in one.values if not one.marks[0].args[0]), "cupy")
