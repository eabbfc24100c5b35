"""NCCL's interface between real processes, over the double of NCCL."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import pytest
import torch
from nccl_double import LastCall, NcclDouble
from nccl_double.groups import PROVIDERS, connected, in_turn, on, tell_version

from collectives.backends.nccl import providers
from collectives.backends.nccl.libnccl import (
    DATA_TYPES,
    Communicator,
    NcclConfig,
    NcclDataType,
    NcclError,
    NcclRedOp,
    NcclStatus,
    version_text,
)

FLOAT = NcclDataType.FLOAT32


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.to(torch.float64).tolist() == expected.to(torch.float64).tolist()


def groups(rank: int, size: int, provider: str, path: Path) -> None:
    with connected(rank, size, provider, path) as (double, library, communicator):
        one, two = torch.tensor([1.0]), torch.tensor([float(rank)])

        def reduce(data: torch.Tensor, communicator: Communicator = communicator, dtype: int = FLOAT) -> None:
            communicator.all_reduce(data.data_ptr(), data.data_ptr(), 1, dtype, NcclRedOp.SUM, 0)

        with library.group:
            with library.group:
                reduce(one)
            reduce(two)
            assert one.item() == 1.0, "nothing starts before the outermost end"
        assert (one.item(), two.item()) == (size, sum(range(size)))

        with pytest.raises(NcclError, match="ncclGroupEnd") as caught:
            library.group.__exit__(None, None, None)
        assert caught.value.status == NcclStatus.INVALID_USAGE

        before = one.item()
        library.group.__enter__()
        reduce(one)
        with pytest.raises(NcclError, match="type 99"):
            reduce(two, dtype=99)
        with pytest.raises(NcclError, match="ncclInvalidArgument"):
            library.group.__exit__(None, None, None)
        assert one.item() == before, "none of a group that failed is started"
        with pytest.raises(NcclError, match="type 99"), library.group:
            reduce(two, dtype=99)
        with pytest.raises(KeyError, match="mine"), library.group:
            raise KeyError("mine")

        for function in (
            lambda: communicator.split(0, 0),
            lambda: library.init(bytes(128), size, rank),
        ):
            with pytest.raises(NcclError, match="close it first"), library.group:
                function()
            with library.group:
                with library.group:
                    pass
                with pytest.raises(NcclError, match="close it first"):
                    function()  # the outer one is still open

        other = communicator.split(0, size - rank)
        assert other is not None
        assert other.rank == size - 1 - rank, "the key orders the ranks"
        with library.group:  # communicators of one group do not wait for each other
            pairs = [(communicator, one), (other, two)]
            one.fill_(1), two.fill_(2)
            for each, data in pairs if rank % 2 else reversed(pairs):
                reduce(data, each)
        assert (one.item(), two.item()) == (size, 2 * size)

        streams = [double.stream(), double.stream()]
        one.fill_(1), two.fill_(2)
        double.sleep(streams[1], 50)
        with library.group:  # one communicator on two streams: each waits for the other
            for stream, data in zip(streams, (one, two), strict=True):
                communicator.all_reduce(data.data_ptr(), data.data_ptr(), 1, FLOAT, NcclRedOp.SUM, stream)
        double.synchronize(streams[0])
        assert (one.item(), two.item()) == (size, 2 * size)
        other.destroy()


def splits(rank: int, size: int, provider: str, path: Path) -> None:
    with connected(rank, size, provider, path) as (double, _, communicator):
        data = torch.tensor([1.0 + rank])
        colors = [0, 1, 0, -1]
        part = communicator.split(colors[rank], 0, NcclConfig(split_share=True))
        if rank == 3:
            assert part is None
        else:
            members = [peer for peer in range(size) if colors[peer] == colors[rank]]
            assert part is not None
            assert (part.rank, part.size) == (members.index(rank), len(members))
            assert double.config(part.handle)["splitShare"] == 1
            part.all_reduce(data.data_ptr(), data.data_ptr(), 1, FLOAT, NcclRedOp.SUM, 0)
            assert data.item() == sum(1.0 + member for member in members)
        with pytest.raises(ValueError, match="but is -2"):
            communicator.split(-2, 0)
        again = communicator.split(0, 0)
        assert again is not None
        data.fill_(1)
        again.all_reduce(data.data_ptr(), data.data_ptr(), 1, FLOAT, NcclRedOp.SUM, 0)
        assert data.item() == size
        again.abort()
        if part is not None:
            part.destroy()


def factors(rank: int, size: int, provider: str, path: Path) -> None:
    exact = {torch.float32: 0.25, torch.float64: 0.5, torch.float16: 1.5, torch.bfloat16: 1.5, torch.int32: 3}
    with connected(rank, size, provider, path) as (_, _, communicator):
        for dtype, factor in exact.items():
            code = DATA_TYPES[dtype]
            op = communicator.premul_sum(factor * (rank + 1), code)
            assert op not in list(NcclRedOp)
            data = torch.full((5,), 2).to(dtype)
            communicator.all_reduce(data.data_ptr(), data.data_ptr(), 5, code, op, 0)
            same(data, torch.full((5,), 2 * factor * sum(range(1, size + 1))))
            with pytest.raises(NcclError, match="reduction operation"):  # of another type
                communicator.all_reduce(data.data_ptr(), data.data_ptr(), 5, NcclDataType.INT8, op, 0)
            communicator.destroy_op(op)
            with pytest.raises(NcclError, match="ncclInvalidArgument"):
                communicator.destroy_op(op)
        op = communicator.premul_sum(1 / 3, NcclDataType.BFLOAT16)
        data = torch.ones(1, dtype=torch.bfloat16)
        communicator.reduce(data.data_ptr(), data.data_ptr(), 1, NcclDataType.BFLOAT16, op, 0, 0)
        third = torch.tensor(1 / 3).to(torch.bfloat16).float()
        assert rank or data.item() == (third * size).to(torch.bfloat16).item(), "rounded to nearest"
        for dtype in (NcclDataType.FLOAT8E4M3, 99):
            with pytest.raises(TypeError, match="factor"):
                communicator.premul_sum(1.0, dtype)
        for factor, dtype in (
            (0.5, NcclDataType.INT32),
            (300, NcclDataType.UINT8),
            (-1, NcclDataType.UINT64),
        ):
            with pytest.raises(ValueError, match="does not fit"):
                communicator.premul_sum(factor, dtype)
        for dtype in (NcclDataType.FLOAT16, NcclDataType.BFLOAT16):
            with pytest.raises(ValueError, match="does not fit"):
                communicator.premul_sum(1e300, dtype)
        left = communicator.premul_sum(1.0, FLOAT)
        communicator.abort()
        communicator.destroy_op(left)


def arguments(rank: int, size: int, provider: str, path: Path) -> None:
    with connected(rank, size, provider, path) as (double, library, communicator):
        assert library.name == provider
        assert library.path == str(path)
        assert version_text(library.version()) == "2.30.7"
        assert len(library.unique_id()) == 128
        assert library.unique_id() != library.unique_id()

        buffer = torch.zeros(8)
        at = buffer.data_ptr()
        wrong = {
            "type 99": lambda: communicator.all_reduce(at, at, 1, 99, 0, 0),
            "type -1": lambda: communicator.broadcast(at, at, 1, -1, 0, 0),
            "operation 77": lambda: communicator.reduce_scatter(at, at, 1, FLOAT, 77, 0),
            "root 9": lambda: communicator.reduce(at, at, 1, FLOAT, 0, 9, 0),
            "root -1": lambda: communicator.broadcast(at, at, 1, FLOAT, -1, 0),
            f"root {size}": lambda: communicator.send(at, 1, FLOAT, size, 0),
            "root -3": lambda: communicator.recv(at, 1, FLOAT, -3, 0),
        }
        for text, function in wrong.items():
            with pytest.raises(NcclError, match=rf"ncclInvalidArgument \(4\).*{text}") as caught:
                function()
            assert caught.value.status == NcclStatus.INVALID_ARGUMENT
        with pytest.raises(NcclError, match=r"ncclUnhandledCudaError.*stream"):
            communicator.all_gather(at, at, 1, FLOAT, 12345)
        for count in (-1, 2**63):
            with pytest.raises(ValueError, match=f"but is {count}"):
                communicator.all_reduce(at, at, count, FLOAT, 0, 0)
        with pytest.raises(ValueError, match="128 bytes, but has 127"):
            library.init(bytes(127), size, rank)
        with pytest.raises(ValueError, match=f"size - 1 = {size - 1}, but is {size}"):
            library.init(bytes(128), size, size)
        with pytest.raises(NcclError, match="unique id"):
            library.init(bytes(128), size, rank)

        double.dry_run(True)
        stream = double.stream()
        big, handle = 2**32 + 5, communicator.handle
        calls = {
            LastCall("ncclAllReduce", big, 9, 4, 0, stream, handle): lambda: communicator.all_reduce(
                at, at, big, 9, 4, stream
            ),
            LastCall("ncclReduce", big, 3, 2, 1, stream, handle): lambda: communicator.reduce(
                at, at, big, 3, 2, 1, stream
            ),
            LastCall("ncclBroadcast", big, 1, 0, 1, stream, handle): lambda: communicator.broadcast(
                at, at, big, 1, 1, stream
            ),
            LastCall("ncclAllGather", big, 11, 0, 0, stream, handle): lambda: communicator.all_gather(
                at, at, big, 11, stream
            ),
            LastCall("ncclReduceScatter", big, 10, 3, 0, stream, handle): lambda: communicator.reduce_scatter(
                at, at, big, 10, 3, stream
            ),
            LastCall("ncclSend", big, 5, 0, 1, stream, handle): lambda: communicator.send(
                at, big, 5, 1, stream
            ),
            LastCall("ncclRecv", big, 6, 0, 1, stream, handle): lambda: communicator.recv(
                at, big, 6, 1, stream
            ),
        }
        for expected, function in calls.items():
            function()
            assert double.last_call() == expected
        double.dry_run(False)
        same(buffer, torch.zeros(8))


def statuses(rank: int, size: int, provider: str, path: Path) -> None:
    names = {
        1: "ncclUnhandledCudaError", 2: "ncclSystemError", 3: "ncclInternalError", 4: "ncclInvalidArgument",
        5: "ncclInvalidUsage", 6: "ncclRemoteError", 7: "ncclInProgress", 8: "ncclTimeout",
        99: "an unknown status",
    }  # fmt: skip
    with connected(rank, size, provider, path) as (double, library, communicator):
        data = torch.zeros(1)
        at = data.data_ptr()
        functions = {
            "ncclAllReduce": lambda: communicator.all_reduce(at, at, 1, FLOAT, 0, 0),
            "ncclSend": lambda: communicator.send(at, 1, FLOAT, 0, 0),
            "ncclCommSplit": lambda: communicator.split(0, 0),
            "ncclGetUniqueId": library.unique_id,
            "ncclCommInitRankConfig": lambda: library.init(bytes(128), size, rank),
        }
        for function, call in functions.items():
            for status, name in names.items():
                double.fail_next(function, status, "as ordered")
                with pytest.raises(NcclError, match=f"{function} failed with {name}.*as ordered") as caught:
                    call()
                assert (caught.value.status, caught.value.status_name) == (status, name)
                copy = pickle.loads(pickle.dumps(caught.value))
                assert (str(copy), copy.status) == (str(caught.value), status)
        double.fail_next("ncclAllReduce", 7)
        with pytest.raises(NcclError, match="NCCL_COMM_BLOCKING=1"):
            functions["ncclAllReduce"]()


SETTINGS: dict[str, tuple[int, object, str, object]] = {
    "cga_cluster_size": (21700, 2, "cgaClusterSize", 2),
    "min_ctas": (21700, 1, "minCTAs", 1),
    "max_ctas": (21700, 4, "maxCTAs", 4),
    "net_name": (21700, "Socket", "netName", "Socket"),
    "split_share": (21800, True, "splitShare", 1),
    "traffic_class": (22600, 3, "trafficClass", 3),
    "comm_name": (22700, "of the test", "commName", "of the test"),
    "collnet_enable": (22700, False, "collnetEnable", 0),
    "nvls_ctas": (22700, 5, "nvlsCTAs", 5),
    "cta_policy": (22800, 2, "CTAPolicy", 2),
    "n_channels_per_net_peer": (22800, 6, "nChannelsPerNetPeer", 6),
    "nvlink_centric_sched": (22800, True, "nvlinkCentricSched", 1),
    "graph_usage_mode": (22900, 1, "graphUsageMode", 1),
    "num_rma_ctx": (22900, 0, "numRmaCtx", 0),
    "max_p2p_peers": (23000, 7, "maxP2pPeers", 7),
    "graph_stream_ordering": (23005, False, "graphStreamOrdering", 0),
}
"""The version that first takes each setting, or this value of it, and what it becomes in NCCL."""


VERSIONS = (22005, 22707, 22809, 22907, 23004, 23007, 23203)


def settings(rank: int, size: int, provider: str, path: Path) -> None:
    for version in VERSIONS:
        tell_version(path, version)
        settings_of(version, rank, size, provider, path)


def settings_of(version: int, rank: int, size: int, provider: str, path: Path) -> None:
    known = {name: row for name, row in SETTINGS.items() if row[0] <= version}
    everything = NcclConfig(blocking=True, **{name: given for name, (_, given, _, _) in known.items()})
    passed = {"blocking": 1, **{field: value for _, _, field, value in known.values()}}
    with connected(rank, size, provider, path, everything) as (double, library, communicator):
        assert library.version() == version
        assert double.config(communicator.handle) == passed
        inherited = communicator.split(0, 0)
        own = communicator.split(0, 0, NcclConfig(max_ctas=7))
        assert inherited is not None
        assert own is not None
        assert double.config(inherited.handle) == passed
        assert double.config(own.handle) == {"blocking": 1, "maxCTAs": 7}
        with pytest.raises(NcclError, match="CTAs"):
            communicator.split(0, 0, NcclConfig(max_ctas=-7))
        lower = communicator.split(0, 0, NcclConfig(min_ctas=2))
        assert lower is not None
        assert double.config(lower.handle) == {"blocking": 1, "minCTAs": 2, "maxCTAs": 64}
        for name, (since, given, _, _) in SETTINGS.items():
            if name not in known:
                said = rf"{name}={given!r} needs NCCL {version_text(since)}, but .* {version_text(version)}"
                with pytest.raises(ValueError, match=said):
                    library.check_config(NcclConfig(**{name: given}))
        for each in (lower, inherited, own):
            each.destroy()


def values_of_settings(rank: int, size: int, provider: str, path: Path) -> None:
    tell_version(path, 22707)
    with connected(rank, size, provider, path, NcclConfig(cta_policy=1)) as (double, _, communicator):
        assert double.config(communicator.handle)["CTAPolicy"] == 1
        with pytest.raises(ValueError, match=r"cta_policy=2 needs NCCL 2\.28\.0, but .* is NCCL 2\.27\.7"):
            communicator.split(0, 0, NcclConfig(cta_policy=2))


def orders_in_graphs(rank: int, size: int, provider: str, path: Path) -> None:
    """NCCL takes these together, and does not do what was asked for."""
    NcclDouble(path)
    library = providers.load(provider)
    for mode in (None, 2):
        with pytest.raises(ValueError, match="graph_stream_ordering=False needs graph_usage_mode=0 or 1"):
            library.check_config(NcclConfig(graph_stream_ordering=False, graph_usage_mode=mode))
    library.check_config(NcclConfig(graph_stream_ordering=True))


def named(rank: int, size: int, provider: str, path: Path) -> None:
    """NCCL keeps no copy of the name; that of a split, too, is where the parent's was."""
    name = f"a name of {20 + rank} letters"
    made = connected(rank, size, provider, path, NcclConfig(comm_name="".join(name)))
    with made as (double, _, communicator):
        part = communicator.split(0, 0)
        assert part is not None
        gc.collect()
        others = [b"x" * (len(name) + more) for more in range(-16, 17) for _ in range(1000)]
        assert double.config(communicator.handle)["commName"] == name
        communicator.destroy()
        others += [b"y" * (len(name) + more) for more in range(-16, 17) for _ in range(1000)]
        assert double.config(part.handle)["commName"] == name
        part.destroy()


def test_nonblocking_communicators_are_refused(provider: str, nccl_library: Path) -> None:
    with pytest.raises(ValueError, match="blocking=False"):
        NcclConfig(blocking=False)
    on(provider, nccl_library, nonblocking, 1, env={"NCCL_COMM_BLOCKING": "0"})


def nonblocking(rank: int, size: int, provider: str, path: Path) -> None:
    NcclDouble(path)
    library = providers.load(provider)
    with pytest.raises(ValueError, match="NCCL_COMM_BLOCKING=0"):
        library.init(library.unique_id(), size, rank)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_by_either_provider(provider: str, nccl_library: Path) -> None:
    """What each provider's loading of NCCL could make different."""
    on(provider, nccl_library, in_turn, 3, [groups, arguments, statuses])


def test_calls(provider: str, nccl_library: Path) -> None:
    on(provider, nccl_library, in_turn, 4, [splits, factors, named, orders_in_graphs])


def test_settings(provider: str, nccl_library: Path) -> None:
    on(provider, nccl_library, in_turn, 2, [settings, values_of_settings])
