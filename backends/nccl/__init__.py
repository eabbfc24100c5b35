"""Process groups over NVIDIA's NCCL, for CUDA tensors.

``group`` turns an operation into copies and NCCL calls (``operations``), issues them on streams (``device``)
and ``communicators`` of the library that ``providers`` find, and returns a ``work``. A ``watchdog`` looks
after those under way; failures have one first cause. CPU tensors are not served.
"""

from __future__ import annotations

from collectives.backends.nccl import providers
from collectives.backends.nccl.device import why_no_cuda
from collectives.backends.nccl.group import ProcessGroupNCCL
from collectives.backends.nccl.operations import capabilities_on
from collectives.backends.nccl.options import NcclConfig, checked_options, option_names
from collectives.core.capabilities import Capabilities
from collectives.registry.backends import GroupOptions

__all__ = ["NcclConfig", "ProcessGroupNCCL", "capabilities", "create", "option_names", "unavailable"]


def unavailable() -> str | None:
    """Returns why NCCL cannot be used here, or ``None``."""
    return why_no_cuda() or providers.unavailable()


def capabilities() -> Capabilities:
    """Returns what a group can do on any device; newer ones reduce the OCP 8-bit floats, too."""
    return capabilities_on("cuda", float8=False)


def create(options: GroupOptions) -> ProcessGroupNCCL:
    """Returns a new group; called by all its ranks.

    With ``device_id``, blocks until they are connected; without, the first operation does that.

    Args:
        options: ``pg_options`` may be :class:`ProcessGroupNCCL.Options` or a dict of their fields.

    Raises:
        TypeError: ``pg_options`` are something else.
        ValueError: they name a provider that does not exist.
        DistBackendError: no provider can be used, or NCCL could not make the connections.
        CollectiveTimeoutError: ranks did not come in time to make them.
    """
    chosen = checked_options(options.pg_options, options.rank)
    return ProcessGroupNCCL(options, providers.load(chosen.provider))
