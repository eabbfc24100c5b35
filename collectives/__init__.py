"""A self-contained collective communication runtime for PyTorch tensors.

Inside: the names that users import, each from the module that defines it; what they call is in ``api``. Not
here: backends and training, which are packages of their own (:mod:`collectives.backends`, ``ddp``).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import extend_path
from types import ModuleType
from typing import TYPE_CHECKING

# Python started inside a checkout finds this folder before an installed package; the compiled core is then
# found where it is installed.
__path__ = extend_path(__path__, __name__)

from collectives.dynamo import leave_names_uncompiled
from collectives.torch_bridge import register as _register_with_torch

_OWN = {*globals(), "_OWN"}
"""Names for this module only; all others are its interface, those that modules list in their ``__all__``."""

from collectives.api.coalescing import *
from collectives.api.collectives import *
from collectives.api.debug import *
from collectives.api.deprecated import *
from collectives.api.groups import *
from collectives.api.init_and_destroy import *
from collectives.api.objects import *
from collectives.api.p2p import *
from collectives.api.reconfiguring import *
from collectives.api.world_state import *
from collectives.core.process_group import ProcessGroup as ProcessGroup
from collectives.core.profiling import record_comm as record_comm
from collectives.core.types import *
from collectives.core.work import Work as Work
from collectives.core.work import WorkResult as WorkResult
from collectives.errors import *
from collectives.registry.names import *
from collectives.store import *

if TYPE_CHECKING:
    from collectives.backends.gloo import ProcessGroupGloo as ProcessGroupGloo
    from collectives.backends.mpi import ProcessGroupMPI as ProcessGroupMPI
    from collectives.backends.nccl import ProcessGroupNCCL as ProcessGroupNCCL
    from collectives.ranks.launching import launch as launch
    from collectives.ranks.processes import RankFailedError as RankFailedError
    from collectives.torch_bridge.creation import (
        register_world_with_torch as register_world_with_torch,
    )
else:
    _imported = {name for name, value in globals().items() if not isinstance(value, ModuleType)}
    _LOADED_ON_DEMAND = {
        "ProcessGroupGloo": "collectives.backends.gloo",
        "ProcessGroupMPI": "collectives.backends.mpi",
        "ProcessGroupNCCL": "collectives.backends.nccl",
        "RankFailedError": "collectives.ranks.processes",
        "launch": "collectives.ranks.launching",
        "register_world_with_torch": "collectives.torch_bridge.creation",
    }
    __all__ = [*sorted((_imported - _OWN) | {*_LOADED_ON_DEMAND})]  # noqa: PLE0604 - names

    def __getattr__(name: str) -> object:
        """Loads what few programs need when it is asked for: of the backends' classes, one at most."""
        if name in _LOADED_ON_DEMAND:
            return getattr(import_module(_LOADED_ON_DEMAND[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


leave_names_uncompiled(globals())
_register_with_torch()
