"""What ranks on different machines send each other is encrypted, and what others change is found out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from capture import Capture
from harness import current_store, run_ranks
from interceptor import ARRIVAL, CONTROL, PORTS, STREAM, Interceptor, Tamper
from machines import machines_or_skip, make_machines  # noqa: F401 - a fixture

import collectives as dist
from collectives import DistNetworkError
from collectives.backends.host import ProcessGroupHost
from collectives.bench.core.namespaces import Machines
from collectives.registry.backends import GroupOptions, create_group
from collectives.store import TCPStore

MakeMachines = Callable[..., Machines]
SYNCHRONOUS = dist.AllreduceOptions(asyncOp=False)
MIB = 1 << 20


def _pattern(name: str) -> bytes:
    """Returns 32 bytes that occur nowhere else."""
    return f"<{name:-^30}>".encode()


SECRETS = [*map(_pattern, ("broadcast", "gather", "message", "small", "value"))]


def _tensor(name: str, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(_pattern(name) * (size // 32)), dtype=torch.uint8)


def _say_secrets(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    store = current_store()
    whole = _tensor("broadcast", MIB)
    group.broadcast([whole if rank == 0 else torch.empty_like(whole)], 0).wait()
    parts = [torch.empty(MIB, dtype=torch.uint8) for _ in range(2)]
    group.allgather([parts], [_tensor("gather", MIB)]).wait()
    assert bytes(parts[1 - rank].numpy()) == _pattern("gather") * (MIB // 32)
    message = _tensor("message", MIB)
    if rank == 0:
        group.send([message], 1, 0).wait()
    else:
        got = torch.empty_like(message)
        group.recv([got], 0, 0).wait()
        assert got.equal(message)
    group.broadcast([_tensor("small", 32) if rank == 0 else torch.empty(32, dtype=torch.uint8)], 0).wait()
    if rank == 0:
        store.set("what", _pattern("value"))
    assert store.get("what") == _pattern("value")
    group.barrier().wait()


@pytest.mark.parametrize("encryption", ["off", None])
def test_nobody_on_the_network_reads_tensors_or_values(
    make_machines: MakeMachines,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    encryption: str | None,
) -> None:
    """With ``off`` everything is there to be read, which shows that the capture sees it."""
    machines = make_machines(2)
    if encryption is not None:
        monkeypatch.setenv("COLLECTIVES_ENCRYPTION", encryption)  # of the server of the store, too
    with Capture(machines, 0) as capture:
        run_ranks(
            _say_secrets,
            2,
            backend="host",
            isolated=True,
            machines=(machines, [0, 1]),
            env={"COLLECTIVES_ENCRYPTION": encryption},
        )
        assert capture.seen(SECRETS) == [encryption == "off"] * len(SECRETS)


def _right_results(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    for length in (1, 3, 1000, 50_000, 700_001):
        x = torch.full((length,), float(rank))
        group.allreduce([x], SYNCHRONOUS if length % 2 else None).wait()
        assert x.eq(sum(range(size))).all()
        outputs = [torch.empty(length) for _ in range(size)]
        group.alltoall(outputs, [torch.full((length,), 10.0 * rank + other) for other in range(size)]).wait()
        assert [output[-1].item() for output in outputs] == [10.0 * other + rank for other in range(size)]
        sent, got = torch.full((length,), float(rank)), torch.empty(length)
        works = [
            group.send([sent], (rank + 1) % size, 0),
            group.recv([got], (rank - 1) % size, 0),
        ]
        for work in works:
            work.wait()
        assert got.eq((rank - 1) % size).all()
    group.barrier().wait()


@pytest.mark.parametrize(("placement", "sockets"), [("ab", None), ("aabb", "3"), ("abc", "1")])
def test_results_are_right_where_all_connections_are_encrypted(placement: str, sockets: str | None) -> None:
    run_ranks(
        _right_results,
        len(placement),
        backend="host",
        placement=placement,
        env={"COLLECTIVES_ENCRYPTION": "on", "COLLECTIVES_HOST_STREAMS": sockets},
    )


def _told(rank: int, size: int) -> tuple[str, float]:
    """All-reduces on and on; returns the error of it or of its group, and how long it took to come."""
    small, large = torch.ones(3), torch.ones(MIB // 2)
    end = time.monotonic() + 20
    began = time.monotonic()
    try:
        group = create_group("host", GroupOptions(current_store(), rank, size))
        while time.monotonic() < end:
            began = time.monotonic()
            for tensor in (small, large):
                group.allreduce([tensor], SYNCHRONOUS).wait()
            time.sleep(0.05)
    except dist.DistError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


WAYS = ["flip", "flip length", "repeat", "reorder", "leave out", "truncate", "foreign"]
# A record of a short all-reduce, after which the other rank goes on. Where bytes are kept back, and all that
# would follow with them, only the time limit tells.
SHORT = 4
CASES = [
    *(Tamper(how, STREAM, record=20) for how in WAYS),
    *(Tamper(how, ARRIVAL, record=SHORT) for how in WAYS),
    *(Tamper(how, CONTROL, record=1) for how in WAYS),
    Tamper("flip", STREAM, record=20, from_victim=True),
    Tamper("flip", ARRIVAL, record=SHORT, from_victim=True),
    Tamper("flip", CONTROL, record=1, from_victim=True),
]
QUICK = {CASES[0], CASES[8]}


@pytest.fixture(scope="module")
def intercepted() -> Iterator[Machines]:
    """The machines of an :class:`Interceptor`."""
    with machines_or_skip(4) as machines:
        yield machines


@pytest.mark.parametrize(
    "tamper",
    [pytest.param(one, id=f"{one}", marks=[] if one in QUICK else [pytest.mark.full]) for one in CASES],
)
def test_what_others_change_on_its_way_ends_the_group_on_both_sides(
    intercepted: Machines, tamper: Tamper
) -> None:
    with Interceptor(intercepted, tamper) as interceptor:
        told = run_ranks(
            _told,
            2,
            isolated=True,
            machines=(intercepted, [0, 1]),
            env={"COLLECTIVES_PORT_RANGE": PORTS},
        )
        assert interceptor.tampered() > 0
    finder = 1 if tamper.from_victim else 0
    for text, seconds in told:
        assert f"rank {finder} has ended its connection with rank {1 - finder} on" in text, told
        assert "bytes came on it that the other end did not send" in text
        assert seconds < 10
    assert {text.split(":")[0] for text, _ in told} <= {"DistNetworkError", "GroupAbortedError"}


@pytest.mark.full
def test_a_connection_that_is_cut_within_a_record_is_lost_on_both_sides(intercepted: Machines) -> None:
    with Interceptor(intercepted, Tamper("cut", STREAM, record=20)):
        told = run_ranks(
            _told,
            2,
            isolated=True,
            machines=(intercepted, [0, 1]),
            env={"COLLECTIVES_PORT_RANGE": PORTS},
        )
    assert all("lost its connection with rank" in text for text, _ in told), told


def _refused_to_form(rank: int, size: int, encryption: str) -> str:
    os.environ["COLLECTIVES_ENCRYPTION"] = encryption if rank == 0 else "off" if encryption == "on" else "on"
    with pytest.raises(DistNetworkError) as caught:
        ProcessGroupHost(current_store(), rank, size)
    return str(caught.value)


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_ranks_that_do_not_agree_form_no_group(encryption: str) -> None:
    told = run_ranks(_refused_to_form, 2, encryption, placement="ab", isolated=True)
    for text in told:
        assert "connections with other machines, and rank 1 does" in text
        assert "set COLLECTIVES_ENCRYPTION to the same on all ranks" in text


def _downgraded(rank: int, size: int) -> str:
    with pytest.raises(dist.DistError) as caught:
        ProcessGroupHost(current_store(), rank, size, timeout=timedelta(seconds=4))
    return str(caught.value)


def test_a_suite_that_is_changed_on_its_way_lets_no_connection_be_made(intercepted: Machines) -> None:
    with Interceptor(intercepted, Tamper("downgrade", CONTROL)) as interceptor:
        told = run_ranks(
            _downgraded,
            2,
            isolated=True,
            machines=(intercepted, [0, 1]),
            env={"COLLECTIVES_PORT_RANGE": PORTS},
        )
        assert interceptor.tampered() > 0
    assert all("COLLECTIVES_ENCRYPTION" in text for text in told), told


def _at_an_agent(rank: int, size: int) -> str:
    """Rank 0 plays torchrun's agent on its machine, whose store the other rank uses."""
    store = current_store()
    if rank == 0:
        agent = torch_dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        store.set("agent", f"{os.environ['OWN_ADDRESS']}:{agent.port}")
        store.wait(["done"])
        return ""
    host, _, port = store.get("agent").decode().rpartition(":")
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": port}
    try:
        client = TCPStore(host, int(port), timeout=timedelta(seconds=20))
        client.set("key", "value")
        client.close()
        return "in clear"
    except DistNetworkError as error:
        return str(error)
    finally:
        store.set("done", "")


@pytest.mark.parametrize("encryption", ["on", None])
def test_torchs_own_store_on_another_machine_is_refused_where_encryption_was_asked_for(
    make_machines: MakeMachines,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    encryption: str | None,
) -> None:
    if encryption is not None:
        monkeypatch.setenv("COLLECTIVES_ENCRYPTION", encryption)  # of the server of the ranks' store, too
    machines = make_machines(2)
    env = {"COLLECTIVES_ENCRYPTION": encryption, "OWN_ADDRESS": machines.address(0)}
    told = run_ranks(_at_an_agent, 2, isolated=True, machines=(machines, [0, 1]), env=env)[1]
    if encryption is None:
        assert told == "in clear"
    else:
        assert "COLLECTIVES_ENCRYPTION=on, and torchrun's agent on another machine serves the store" in told
