"""Has the ranks find torch's systems loaded."""

import harness
import pytest


@pytest.fixture(scope="session", autouse=True)
def systems_loaded() -> None:
    """Only where a test of this folder runs, because they take seconds to load."""
    harness.preload(
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    )
