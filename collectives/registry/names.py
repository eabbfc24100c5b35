"""Names of backends as users write them, and backends that users add at run time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from collectives.core.process_group import ProcessGroup
from collectives.core.types import ReduceOp, default_pg_timeout
from collectives.logs import Log
from collectives.registry import backends as registry

__all__ = [
    "Backend",
    "BackendConfig",
    "DistributedBackendOptions",
    "get_default_backend_for_device",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_ucc_available",
    "is_xccl_available",
    "supports_complex",
]

log = Log()

_NCCL_TIMEOUT = timedelta(minutes=10)
"""Time limit of NCCL groups where the user names none, as in torch.distributed."""

_COMPLEX_REDUCTIONS = frozenset({"SUM", "AVG", "PREMUL_SUM"})


@dataclass(slots=True)
class DistributedBackendOptions:
    """First argument of the function of a backend registered with ``extended_api=True``.

    Attributes:
        store: a store of the group's own.
        group_rank: this process's rank within the group.
        group_size: number of ranks.
        timeout: time limit of operations.
        group_id: name of the group, unique in the job.
        global_ranks_in_group: ranks of the members in the default group, by group rank.
        device_id: device that the process is bound to.
    """

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]
    device_id: torch.device | None = None


class _Plugin(NamedTuple):
    creator_fn: Callable[..., ProcessGroup]
    extended_api: bool


class Backend(str):  # noqa: SLOT000 - attributes are added by register_backend
    """Names of backends: ``Backend.HOST``, ``Backend.GLOO``, ..., and those that ``register_backend`` adds.

    ``Backend(name)`` returns the lower-case name as a plain string where it is known, or a list of names by
    device type such as ``"cpu:host,cuda:nccl"``.

    Names of torch's that have no counterpart here, ``Backend.UCC`` and ``Backend.XCCL``, are names as well;
    groups of them are refused.

    Raises:
        ValueError: the name is not known; the message lists those that are.
    """

    UNDEFINED: ClassVar[str] = "undefined"
    """Stands for "not chosen yet"; no group has it."""
    HOST: ClassVar[str] = "host"
    ROUND_ROBIN: ClassVar[str] = "round_robin"
    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    UCC: ClassVar[str] = "ucc"
    MPI: ClassVar[str] = "mpi"
    XCCL: ClassVar[str] = "xccl"

    backend_list: ClassVar[list[str]] = [UNDEFINED]
    """The names that can be used, and ``UNDEFINED``."""
    default_device_backend_map: ClassVar[dict[str, str]] = {}
    """For each device type, the backend used where the user names none."""
    backend_capability: ClassVar[dict[str, list[str]]] = {}
    """For each backend, the device types it serves."""
    backend_type_map: ClassVar[dict[str, ProcessGroup.BackendType]] = {
        UNDEFINED: ProcessGroup.BackendType.UNDEFINED,
        GLOO: ProcessGroup.BackendType.GLOO,
        NCCL: ProcessGroup.BackendType.NCCL,
        XCCL: ProcessGroup.BackendType.XCCL,
        UCC: ProcessGroup.BackendType.UCC,
        MPI: ProcessGroup.BackendType.MPI,
    }
    """Kind of each backend; every other one is ``CUSTOM``."""
    _plugins: ClassVar[dict[str, _Plugin]] = {}

    def __new__(cls, name: str) -> str:  # type: ignore[misc]  # a plain string, as in torch.distributed
        """Returns the name in lower case."""
        if not isinstance(name, str):
            raise ValueError(f"a backend's name is a string, but {name!r} is of type {type(name).__name__}")
        lower = name.lower()
        if ":" in lower:
            for part in _split_pairs(lower).values():
                registry.backend_spec(part)
        elif lower not in cls.backend_type_map:
            registry.backend_spec(lower)
        return lower

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., ProcessGroup],
        extended_api: bool = False,
        devices: str | list[str] | None = None,
    ) -> None:
        """Adds a backend under ``name``, to be given to :func:`init_process_group` and :func:`new_group`.

        Args:
            name: name; also becomes the attribute ``Backend.NAME``.
            func: makes a group, a :class:`ProcessGroup`; called as ``func(store, rank, size, timeout)``.
            extended_api: call ``func(options, pg_options)`` instead, with :class:`DistributedBackendOptions`
                and what the user gave as ``pg_options``.
            devices: device type or types that it serves; ``None`` for CPU and CUDA.

        Raises:
            ValueError: the name is taken.
            TypeError: ``func`` cannot be called.
        """
        if not callable(func):
            raise TypeError(f"func makes a process group, but {func!r} cannot be called")
        served = (
            ["cpu", "cuda"] if devices is None else [devices] if isinstance(devices, str) else list(devices)
        )
        lower = name.lower()
        if lower == cls.UNDEFINED:
            raise ValueError(f"{name!r} cannot be a backend's name")

        def make(options: registry.GroupOptions) -> ProcessGroup:
            about = options.store, options.rank, options.size, options.timeout
            if not extended_api:
                return func(*about)
            ranks = list(options.global_ranks)
            record = DistributedBackendOptions(*about, options.group_name, ranks, options.device_id)
            return func(record, options.pg_options)

        # A function without the extended interface is given no options.
        spec = registry.BackendSpec(lower, tuple(served), make, option_names=None if extended_api else ())
        registry.register_backend_spec(spec)
        cls._plugins[name.upper()] = _Plugin(func, extended_api)

    @classmethod
    def _learn(cls, spec: registry.BackendSpec) -> None:
        """Takes a backend of the registry into the tables."""
        if not hasattr(cls, spec.name.upper()):
            setattr(cls, spec.name.upper(), spec.name)
        cls.backend_list.append(spec.name)
        cls.backend_type_map.setdefault(spec.name, ProcessGroup.BackendType.CUSTOM)
        cls.backend_capability[spec.name] = list(spec.devices)
        for device in () if spec.composite else spec.devices:
            cls.default_device_backend_map.setdefault(device, spec.name)


registry.watch_backends(Backend._learn)


class BackendConfig:
    """The backend for each device type.

    Args:
        backend: a name, for all device types that it serves; ``"<device>:<backend>,..."``; or
            ``Backend.UNDEFINED`` for the default backends of the CPU and of the machine's accelerator.

    Where the machine has an accelerator whose default backend cannot be used, ``UNDEFINED`` leaves it out and
    warns; a backend that is named must be usable.

    Attributes:
        device_backend_map: the backend for each device type. Of a backend that was named alone, groups may
            serve fewer: :meth:`narrow`.
        names_devices: whether the device types were named.

    Raises:
        ValueError: a name is not known, a device type is named twice, or a backend does not serve it.
    """

    def __init__(self, backend: str) -> None:
        name = Backend(backend)
        self.names_devices = ":" in name
        if name == Backend.UNDEFINED:
            self.device_backend_map = _default_backends()
        elif self.names_devices:
            self.device_backend_map = _split_pairs(name)
            for device, part in self.device_backend_map.items():
                reason = _why_not_served(device, part)
                if reason is not None:
                    raise ValueError(f"backend {backend!r}: {reason}")
        else:
            self.device_backend_map = dict.fromkeys(registry.backend_spec(name).devices, name)

    def __repr__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())

    def get_device_backend_map(self) -> dict[str, str]:
        """Returns the backend for each device type."""
        return self.device_backend_map

    def narrow(self, devices: Collection[str], refusals: Mapping[str, str] = MappingProxyType({})) -> None:
        """Leaves out the device types that the group which was made does not take.

        Args:
            devices: those that it takes.
            refusals: for others, why not, as far as it is known.

        Raises:
            ValueError: it does not take one that was named, or none at all.
        """
        missing = [device for device in self.device_backend_map if device not in devices]
        if missing and (self.names_devices or not devices):
            reasons = [refusals[device] for device in missing if device in refusals]
            raise ValueError(
                f"backend {self!r}: the group that was made takes no tensors on {' and '.join(missing)}"
                f"{': ' if reasons else ''}{'; '.join(reasons)}"
            )
        self.device_backend_map = {
            device: name for device, name in self.device_backend_map.items() if device in devices
        }

    def names(self) -> list[str]:
        """Returns the different backends, in order."""
        return list(dict.fromkeys(self.device_backend_map.values()))

    def name(self) -> str:
        """Returns the backend's name where there is only one, else all pairs."""
        names = self.names()
        return names[0] if len(names) == 1 else repr(self)


def _split_pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    if text.rpartition(":")[2].isdecimal() and (hint := registry.name_here(text)):
        raise ValueError(f"unknown backend {text!r}{hint}")
    for pair in text.split(","):
        device, colon, name = pair.strip().partition(":")
        if not colon or not device or not name or ":" in name:
            raise ValueError(
                f"{pair!r} in backend {text!r} is not '<device type>:<backend>', such as 'cpu:host'"
            )
        if device in pairs:
            raise ValueError(f"device type {device!r} is named twice in backend {text!r}")
        pairs[device] = name
    return pairs


def _why_not_served(device: str, backend: str) -> str | None:
    """Returns why a backend cannot have a device type; ``None`` where it can."""
    served = registry.backend_spec(backend).devices
    if device in served:
        return None
    others = [name for name in registry.backend_names() if device in registry.backend_spec(name).devices]
    return f"{backend} serves tensors on {', '.join(served)}, not on {device}, " + (
        f"which {' and '.join(others)} can serve" if others else "which no backend serves"
    )


def _default_backends() -> dict[str, str]:
    """Returns the default backend of the CPU and, where there is one, of the accelerator."""
    known = Backend.default_device_backend_map
    chosen = {"cpu": known["cpu"]}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type in known:
        name = known[accelerator.type]
        reason = registry.why_unavailable(name)
        if reason is None:
            chosen[accelerator.type] = name
        else:
            log.warning(
                "tensors on %s cannot be communicated, because backend %r is not available: %s",
                accelerator.type,
                name,
                reason,
            )
    return chosen


def default_timeout(backend: str) -> timedelta:
    """Returns the time limit of operations of a backend where the user names none."""
    return _NCCL_TIMEOUT if backend == Backend.NCCL else default_pg_timeout


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Returns the name of the backend used for a device type where the user names none.

    Args:
        device: a device or its type.

    Returns:
        The name, such as ``"host"`` for ``"cpu"``.

    Raises:
        ValueError: there is none for this device type.
        RuntimeError: ``device`` is a text that names no device.
    """
    kind = torch.device(device).type
    name = Backend.default_device_backend_map.get(kind)
    if name is None:
        known = ", ".join(sorted(Backend.default_device_backend_map))
        raise ValueError(f"no backend is registered for device {device!s}; there are some for {known}")
    return name


def is_backend_available(backend: str) -> bool:
    """Returns whether a backend can be used in this process.

    Args:
        backend: its name in any case, or ``"<device>:<backend>,..."``, of which all must be usable.

    Returns:
        Whether a group of it can be made; ``False`` for a name that is not known.

    Raises:
        ValueError: pairs are not written so, or a device type is named twice.
    """
    lower = backend.lower()
    if ":" not in lower:
        return lower in registry.backend_names() and registry.why_unavailable(lower) is None
    return all(
        is_backend_available(name) and _why_not_served(device, name) is None
        for device, name in _split_pairs(lower).items()
    )


def is_gloo_available() -> bool:
    """Returns whether the gloo backend can be used in this process.

    Returns:
        As :func:`is_backend_available` of ``"gloo"``.
    """
    return is_backend_available(Backend.GLOO)


def is_mpi_available() -> bool:
    """Returns whether the mpi backend can be used in this process.

    Returns:
        As :func:`is_backend_available` of ``"mpi"``.
    """
    return is_backend_available(Backend.MPI)


def is_nccl_available() -> bool:
    """Returns whether the nccl backend can be used in this process.

    Returns:
        As :func:`is_backend_available` of ``"nccl"``.
    """
    return is_backend_available(Backend.NCCL)


def is_ucc_available() -> bool:
    """Returns whether a backend named ucc can be used in this process.

    Returns:
        ``False``, unless the user has registered one of this name.
    """
    return is_backend_available(Backend.UCC)


def is_xccl_available() -> bool:
    """Returns whether a backend named xccl can be used in this process.

    Returns:
        ``False``, unless the user has registered one of this name.
    """
    return is_backend_available(Backend.XCCL)


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Returns whether a reduction is defined for complex tensors.

    Args:
        reduceOp: one of ours or of ``torch.distributed``.

    Returns:
        ``True`` for sums, averages and scaled sums.

    Raises:
        TypeError: it is neither.
    """
    return ReduceOp.of(reduceOp).name in _COMPLEX_REDUCTIONS
