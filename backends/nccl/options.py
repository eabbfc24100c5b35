"""What a user can choose of an NCCL group and of its communicators."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

from collectives.core.arguments.option_records import BackendOptions

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def _since(version: int) -> Any:
    """Returns the field of a setting that NCCL reads from a version on."""
    return field(default=None, metadata={"since": version})


@dataclass(slots=True, kw_only=True)
class NcclConfig:
    """Settings of a communicator, equal on all its ranks; ``None`` leaves a choice to NCCL.

    Also ``ProcessGroupNCCL.NCCLConfig``, as in torch, with the same names; they are given as
    ``ProcessGroupNCCL.Options(config=...)``, or set on the ``config`` of options. Read when a communicator is
    made, which refuses those that the loaded NCCL does not read.

    Attributes:
        blocking: may only be True, which is how every communicator is made here.
        cga_cluster_size: thread blocks of a cluster, 0 to 8 (NCCL 2.17).
        min_ctas: lower bound of the thread blocks per kernel (NCCL 2.17).
        max_ctas: upper bound of the thread blocks per kernel (NCCL 2.17).
        net_name: network module to use, such as ``"Socket"`` or ``"IB"`` (NCCL 2.17).
        split_share: whether communicators split from this one share its resources (NCCL 2.18).
        traffic_class: traffic class of the network connections (NCCL 2.26).
        comm_name: name of the communicator in NCCL's logs and traces (NCCL 2.27).
        collnet_enable: whether collectives may run in the network (NCCL 2.27).
        cta_policy: NCCL's policy of using thread blocks: 0 default, 1 efficiency (NCCL 2.27), 2 zero
            (NCCL 2.28).
        nvls_ctas: thread blocks of NVLink SHARP kernels (NCCL 2.27).
        n_channels_per_net_peer: network channels per peer of point-to-point messages (NCCL 2.28).
        nvlink_centric_sched: whether kernels are placed near NVLink (NCCL 2.28).
        graph_usage_mode: use in CUDA graphs: 0 none, 1 one graph, 2 several graphs, or graphs and other
            operations side by side, which is NCCL's default (NCCL 2.29).
        num_rma_ctx: contexts of one-sided communication; 0 saves them, as nothing here uses it (NCCL 2.29).
        max_p2p_peers: bound of the ranks that one exchanges messages with at the same time (NCCL 2.30).
        graph_stream_ordering: whether NCCL orders the kernels of several communicators within a graph; where
            it does not, the program has to. False needs a ``graph_usage_mode`` of 0 or 1 (NCCL 2.30.5).

    Raises:
        ValueError: ``blocking`` is False.
    """

    blocking: bool | None = None
    cga_cluster_size: int | None = _since(21700)
    min_ctas: int | None = _since(21700)
    max_ctas: int | None = _since(21700)
    net_name: str | None = _since(21700)
    split_share: bool | None = _since(21800)
    traffic_class: int | None = _since(22600)
    comm_name: str | None = _since(22700)
    collnet_enable: bool | None = _since(22700)
    cta_policy: int | None = _since(22700)
    nvls_ctas: int | None = _since(22700)
    n_channels_per_net_peer: int | None = _since(22800)
    nvlink_centric_sched: bool | None = _since(22800)
    graph_usage_mode: int | None = _since(22900)
    num_rma_ctx: int | None = _since(22900)
    max_p2p_peers: int | None = _since(23000)
    graph_stream_ordering: bool | None = _since(23005)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "blocking" and value is not None and not value:
            raise ValueError(
                "blocking=False is not supported: communicators are made and used by calls that block; leave "
                "blocking out, and use abort() to end a call that hangs"
            )
        object.__setattr__(self, name, value)

    def given(self) -> dict[str, bool | int | str]:
        """Returns the settings that NCCL is to be told, by name."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None and name != "blocking"}


@dataclass(slots=True)
class Options(BackendOptions):
    """Options of the nccl backend, given as ``pg_options``; equal on all ranks.

    Attributes:
        is_high_priority_stream: whether communication runs on streams that the device prefers.
        config: settings of the communicators; those that the loaded NCCL does not read are refused when a
            communicator is made.
        duplex_messages: whether the messages of two ranks wait only for earlier ones of the same direction,
            which takes a second communicator for each pair of ranks, with its memory.
        provider: ``"cupy"`` or ``"pynccl"``; ``None`` for the one that ``COLLECTIVES_NCCL_PROVIDER`` names,
            and without it the first that works.
        blocking_wait: whether ``wait()`` blocks the host until the operation is done, so that its error is
            raised there, instead of letting only the current stream wait; ``None`` for what
            ``TORCH_NCCL_BLOCKING_WAIT`` says, and without it False.
    """

    is_high_priority_stream: bool = False
    config: NcclConfig = field(default_factory=NcclConfig)
    provider: str | None = None
    blocking_wait: bool | None = None
    duplex_messages: bool = False

    _backend: ClassVar[str] = "nccl"
    _shown: ClassVar[str] = "ProcessGroupNCCL.Options of collectives"

    @property
    def waits_block(self) -> bool:
        """Whether ``wait()`` blocks the host, by choice or by the environment."""
        if self.blocking_wait is not None:
            return self.blocking_wait
        return os.environ.get(_BLOCKING_WAIT, "").strip().lower() in {"1", "t", "true", "y", "yes"}


option_names = Options.names


def checked_options(given: Any, rank: int) -> Options:
    """Returns the options that a user gave, as a record or as a dict of some fields, or the default ones.

    Raises:
        TypeError: they are something else.
    """
    chosen = Options.of(given, f"[rank {rank}] pg_options of the nccl backend:", Options)
    if not isinstance(chosen.config, NcclConfig):
        raise TypeError(
            f"[rank {rank}] pg_options.config must be a NcclConfig, but is of type "
            f"{type(chosen.config).__name__}"
        )
    return chosen
