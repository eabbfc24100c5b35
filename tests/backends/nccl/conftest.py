"""The double of NCCL for the tests of this folder."""

from __future__ import annotations

from nccl_double.fixtures import nccl_library, provider  # noqa: F401 - fixtures
