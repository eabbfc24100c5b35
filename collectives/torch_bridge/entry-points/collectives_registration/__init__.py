"""Makes our backends known to ``torch.distributed``, without an import of :mod:`collectives`.

torch finds this package by its entry points: that of group ``torch.backends`` while torch itself is imported,
that of group ``torch.distributed.backends`` (torch 2.14 and newer) when a program asks for a backend that
torch does not know. Every program that imports torch pays for the first. So this package stands beside
``collectives``, imports nothing, and makes a few entries in torch's tables; the backends are imported when a
group is made. vLLM loads the entry points of its plugins in every process in the same way.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["autoload", "check_vllm", "register", "register_backend", "vllm_platform"]

LANES = range(1, 9)
"""Numbers of lanes that have a name in torch, such as ``collectives_round_robin:3``."""


def autoload() -> None:
    """Registers the backends while torch is being imported; never raises, for nobody could import torch then.

    A name that another package has taken stays that package's; ``import collectives`` says so.
    """
    # Without this module torch has no process groups, or asks the other entry point later.
    if "torch.distributed.distributed_c10d" in sys.modules:
        for name, backend, devices, fixed in _known():
            if not _taken(name):
                register_backend(name, backend, devices, fixed)
        _prepare_torch()


def register() -> None:
    """Registers the backends that come with this package.

    Raises:
        ValueError: torch knows another backend of one of the names.
    """
    for about in _known():
        register_backend(*about)
    _prepare_torch()
    _register_independent()


def register_backend(
    name: str,
    backend: str,
    devices: str | Sequence[str] | None = ("cpu",),
    fixed: Mapping[str, Any] | None = None,
) -> None:
    """Makes a backend of ours known to ``torch.distributed.init_process_group`` and ``new_group``.

    Args:
        name: name in torch, lower-case.
        backend: name in :mod:`collectives.registry.backends`.
        devices: device type or types that it serves; ``None`` for CPU and CUDA.
        fixed: fields of the backend's options that the name stands for.

    Raises:
        ValueError: torch knows another backend of this name.
    """
    import torch.distributed as torch_dist

    if _taken(name):
        owner = getattr(torch_dist.Backend._plugins[name.upper()].creator_fn, "__module__", "unknown")
        raise ValueError(
            f"torch.distributed already has a backend {name!r}, registered by another package (module "
            f"{owner}); uninstall one of the two, or register yours under another name"
        )
    creator = _Creator(name, backend, fixed or {})
    served = devices if devices is None or isinstance(devices, str) else list(devices)
    torch_dist.Backend.register_backend(name, creator, extended_api=True, devices=served)


def vllm_platform() -> str | None:
    """Returns the name of vLLM's platform over our groups where ``VLLM_PLUGINS`` names ``collectives``.

    Called by vLLM in each of its processes, when it looks for its platform.
    """
    if "collectives" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return None  # vLLM asks everybody where the variable is not set
    return "collectives.integrations.vllm.platform.CollectivesPlatform"


def check_vllm() -> None:
    """Has vLLM fail where it was told to use our groups, but does not; called by it in each of its processes.

    Raises:
        RuntimeError: vLLM has another platform.
    """
    wanted = vllm_platform()
    if wanted is None:
        return
    platforms: Any = importlib.import_module("vllm.platforms")
    kind = type(platforms.current_platform)
    if wanted != f"{kind.__module__}.{kind.__qualname__}":
        raise RuntimeError(
            f"VLLM_PLUGINS names collectives, but vLLM took the platform {kind.__qualname__}; unset "
            "VLLM_TARGET_DEVICE, because of which it asks no plugin for a platform"
        )


def _known() -> list[tuple[str, str, Sequence[str], Mapping[str, Any] | None]]:
    """Returns the backends of this package, as the arguments of :func:`register_backend`."""
    import torch

    # where torch is built without CUDA, nothing could ever be served there
    devices = ("cpu", "cuda") if torch.version.cuda is not None else ("cpu",)
    return [
        ("collectives", "host", devices, None),
        ("collectives_mpi", "mpi", ("cpu",), None),
        ("collectives_round_robin", "round_robin", ("cpu",), None),
        *((f"collectives_round_robin:{n}", "round_robin", ("cpu",), {"lanes": n}) for n in LANES),
    ]


def _prepare_torch() -> None:
    """Makes the entries in torch that are for all backends; a second call changes nothing."""
    _hint_at_names()
    _register_rendezvous()
    _start_batches_together()
    _connect_new_groups_afresh()


def _register_rendezvous() -> None:
    """Makes ``mpi://`` known to torch's rendezvous; what carries it out is imported when it is used."""

    def rendezvous(url: str, **options: Any) -> Any:
        return importlib.import_module("collectives.backends.mpi.rendezvous").handle_url(url, **options)

    handlers: Any = importlib.import_module("torch.distributed.rendezvous")
    handlers._rendezvous_handlers.setdefault("mpi", rendezvous)


def _register_independent() -> None:
    """Makes the backends known to ``torch.distributed._dist2``, where this torch has it."""
    import torch.distributed as torch_dist

    try:
        dist2: Any = importlib.import_module("torch.distributed._dist2")
    except ImportError:
        return
    for name, _, _, _ in _known():
        dist2._BACKENDS.setdefault(name, torch_dist.Backend._plugins[name.upper()].creator_fn.independent)


def _start_batches_together() -> None:
    """Puts a function before ``torch.distributed.batch_isend_irecv`` that knows our groups.

    torch starts the messages of a batch together on groups of its own class only, not of one derived from it.
    Called one by one, those that connect two ranks wait for each other around a ring.
    """
    import torch.distributed as torch_dist

    functions: Any = importlib.import_module("torch.distributed.distributed_c10d")
    one_by_one = functions.batch_isend_irecv
    if getattr(one_by_one, "__module__", "") == __name__:
        return

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        group = (
            getattr(p2p_op_list[0], "group", None) if isinstance(p2p_op_list, list) and p2p_op_list else None
        )
        if not (hasattr(group, "batch") and group.supports_coalescing):
            works: list[Any] = one_by_one(p2p_op_list)
            return works
        functions._check_p2p_op_list(p2p_op_list)
        with group.batch() as whole:
            for op in p2p_op_list:
                op.op(op.tensor, op.peer, op.group, op.tag)
        return list(whole)

    batch_isend_irecv.__doc__ = one_by_one.__doc__
    functions.batch_isend_irecv = torch_dist.batch_isend_irecv = batch_isend_irecv


def _connect_new_groups_afresh() -> None:
    """Keeps ``torch.distributed.new_group`` from splitting groups off ours, which ``split_group`` alone does.

    In a world that is bound to a device, torch takes what supports splitting for the source of every new
    group. It hands that to the group's maker, as its own class only, and has the ranks outside of the group
    take part; until 2.14 also where the new group has another backend.
    """
    functions: Any = importlib.import_module("torch.distributed.distributed_c10d")
    of_torch = getattr(functions, "_get_split_source", None)
    if getattr(of_torch, "__module__", __name__) == __name__:  # torch has none, or it is this one
        return

    def _get_split_source(pg: Any, *args: Any) -> Any:
        return None if hasattr(pg, "make_part") else of_torch(pg, *args)

    functions._get_split_source = _get_split_source


def _taken(name: str) -> bool:
    """Returns whether torch knows a backend of this name that is not ours."""
    import torch.distributed as torch_dist

    plugin = torch_dist.Backend._plugins.get(name.upper())
    return plugin is not None and not isinstance(plugin.creator_fn, (_Creator, _Hint))


class _Hint:
    """Stands in torch for the name that a backend has in ``collectives`` only, and says the one to use.

    Args:
        name: name in ``collectives``.
        in_torch: name in torch.
    """

    def __init__(self, name: str, in_torch: str) -> None:
        self.name = name
        self.in_torch = in_torch

    def __call__(self, options: Any, pg_options: Any = None) -> Any:  # noqa: ARG002 - torch gives them
        """Raises an error with the hint; called by torch on every member."""
        raise ValueError(
            f"[rank {options.group_rank}] backend {self.name!r} is known to collectives.init_process_group; "
            f"torch.distributed calls it {self.in_torch!r}"
        )


def _hint_at_names() -> None:
    """Has torch raise an error that helps for names of ``collectives``; they stay unavailable there."""
    import torch.distributed as torch_dist

    backends: Any = torch_dist.Backend
    for in_torch, name, _, fixed in _known():
        # torch has an error of its own for "mpi"; a user may register a backend of these names.
        if fixed is None and name not in backends.backend_type_map:
            backends.backend_type_map[name] = torch_dist.ProcessGroup.BackendType.CUSTOM
            backends._plugins[name.upper()] = backends._BackendPlugin(_Hint(name, in_torch), True)


class _Creator:
    """Makes groups of one backend for torch.

    Args:
        name: name in torch.
        backend: name in the registry.
        fixed: fields of the backend's options that the name stands for.
    """

    def __init__(self, name: str, backend: str, fixed: Mapping[str, Any]) -> None:
        self.name = name
        self.backend = backend
        self.fixed = fixed

    def __call__(self, options: Any, pg_options: Any = None) -> Any:
        """Returns the group; called by torch on every member, blocks until they are connected.

        Args:
            options: torch's record of store, rank, size, time limit and names.
            pg_options: options of the backend itself, as the user gave them.
        """
        from collectives.torch_bridge import creation

        return creation.create(self.name, self.backend, options, pg_options, self.fixed)

    def independent(
        self, store: Any, rank: int, world_size: int, timeout: Any, device: Any, **kwargs: Any
    ) -> Any:
        """Returns a group that is in no world; called by ``torch.distributed._dist2`` on every rank.

        Args:
            store: a store that all ranks reach.
            rank: this process's rank.
            world_size: number of ranks.
            timeout: time limit of operations.
            device: device of the tensors.
            kwargs: options of the backend itself.
        """
        from collectives.torch_bridge import creation

        about = store, rank, world_size, timeout, device
        return creation.create_independent(self.name, self.backend, *about, kwargs or None, self.fixed)
