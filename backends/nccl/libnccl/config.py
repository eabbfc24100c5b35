"""The settings of a communicator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["NcclConfig"]


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
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: bool | None = None
    traffic_class: int | None = None
    comm_name: str | None = None
    collnet_enable: bool | None = None
    cta_policy: int | None = None
    nvls_ctas: int | None = None
    n_channels_per_net_peer: int | None = None
    nvlink_centric_sched: bool | None = None
    graph_usage_mode: int | None = None
    num_rma_ctx: int | None = None
    max_p2p_peers: int | None = None
    graph_stream_ordering: bool | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "blocking" and value is not None and not value:
            raise ValueError(
                "blocking=False is not supported: communicators are made and used by calls that block; leave "
                "blocking out, and use abort() to end a call that hangs"
            )
        object.__setattr__(self, name, value)

    def given(self) -> dict[str, bool | int | str]:
        """Returns the settings that NCCL is to be told, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None and name != "blocking"}
