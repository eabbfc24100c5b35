"""The network namespaces that play machines: separate, joined, shaped, and gone with whoever made them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import current_store, run_ranks
from machines import make_machines  # noqa: F401 - a fixture
from sources import SAFE_PATH

from collectives.bench.core.namespaces import INTERFACE, Machines, burst_bytes, enter


def _address_of_namespace(rank, size):
    store = current_store()
    own = subprocess.run(
        ["ip", "-4", "-oneline", "address", "show", INTERFACE], capture_output=True, text=True, check=True
    ).stdout.split()[3]
    store.set(f"address{rank}", own)
    return [store.get(f"address{r}").decode() for r in range(size)]


def test_ranks_run_on_the_machines_that_they_are_given(make_machines):  # noqa: F811
    machines = make_machines(2)
    first, second = (f"{machines.address(m)}/24" for m in range(2))
    results = run_ranks(_address_of_namespace, 3, isolated=True, machines=(machines, [0, 0, 1]))
    assert results == [[first, first, second]] * 3


def _transfer(rank, size, addresses, total):
    store = current_store()
    if rank == 0:
        with socket.create_server((addresses[0], 0)) as listener:
            store.set("port", str(listener.getsockname()[1]))
            plug, _ = listener.accept()
            with plug:
                got = 0
                begin = time.monotonic()
                while piece := plug.recv(1 << 20):
                    got += len(piece)
                return got, time.monotonic() - begin
    with socket.create_connection((addresses[0], int(store.get("port")))) as plug:
        plug.sendall(bytes(total))
    return None


def test_a_link_is_shaped_and_counted(make_machines):  # noqa: F811
    machines = make_machines(2, "200mbit")
    total = 8 << 20
    before = machines.sent_bytes(1)
    results = run_ranks(
        _transfer,
        2,
        [machines.address(0), machines.address(1)],
        total,
        isolated=True,
        machines=(machines, [0, 1]),
    )
    got, seconds = results[0]
    assert got == total
    assert total * 8 / seconds < 220e6
    sent = machines.sent_bytes(1) - before
    assert total < sent < 1.1 * total
    # The last acknowledgements may still be on the link when both ranks have ended.
    deadline = time.monotonic() + 10
    while machines.received_bytes(0) < sent:
        assert time.monotonic() < deadline, f"{machines.received_bytes(0)} of {sent} bytes came"
        time.sleep(0.01)


def test_a_slow_link_takes_packets_as_they_come(make_machines):  # noqa: F811
    machines = make_machines(2, "1gbit")
    total = 8 << 20
    addresses = [machines.address(0), machines.address(1)]
    run_ranks(_transfer, 2, addresses, total, isolated=True, machines=(machines, [0, 1]))
    table = subprocess.run(
        machines.command(1, ["cat", "/proc/net/dev"]), capture_output=True, text=True, check=True
    ).stdout
    line = next(line for line in table.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
    packets = int(line.split(":")[1].split()[9])
    # Packets of the network's length, 1500 bytes, cost a machine that plays four links all its processors.
    assert packets < total / 8192, f"{packets} packets for {total} bytes"


_REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=5)
except OSError as error:
    sys.exit(error.errno)
"""


def test_an_unplugged_machine_hears_nothing(make_machines):  # noqa: F811
    machines = make_machines(2)
    command = [sys.executable, "-c", _REACH, machines.address(0)]
    reach = machines.command(1, command)
    assert subprocess.run(reach, check=False).returncode == 111  # refused: the machine is there
    machines.unplug(1)
    assert subprocess.run(reach, check=False).returncode in {101, 113}  # unreachable


@pytest.mark.full
def test_nothing_is_left_of_a_killed_maker(make_machines):  # noqa: F811
    make_machines(1)  # skips where there can be none
    code = (
        "import sys, time\n"
        "from collectives.bench.core.namespaces import Machines\n"
        "machines = Machines(2, '1gbit')\n"
        "print(machines.host, machines.namespace(0), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, *SAFE_PATH, "-c", code], stdout=subprocess.PIPE, text=True
    ) as maker:
        host, namespace = maker.stdout.readline().split()
        maker.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while Path(namespace).exists() or f" {host}/" in _addresses():
        assert time.monotonic() < deadline, "namespaces outlived their maker"
        time.sleep(0.02)


def test_a_namespace_that_has_gone_cannot_be_entered(make_machines):  # noqa: F811
    machines = make_machines(1)
    namespace = machines.namespace(0)
    machines.close()
    with pytest.raises(OSError, match=r"No such file|cannot enter"):
        enter(namespace)


@pytest.mark.parametrize("count", [0, 251])
def test_a_wrong_number_of_machines_is_refused(count):
    with pytest.raises(ValueError, match=f"1 to 250 machines, but count is {count}"):
        Machines(count)


@pytest.mark.parametrize(
    ("rate", "burst"),
    [("1gbit", 62_500), ("125mbps", 62_500), ("1000Mbit", 62_500), ("1gibit", 67_108), ("2e", None),
     ("100kbit", 32 << 10), ("100000", 32 << 10), ("10gbit", 256 << 10), ("fast", None), ("0bit", None)],
)  # fmt: skip
def test_burst_of_a_link_is_as_its_rate(rate, burst):
    if burst is not None:
        assert burst_bytes(rate) == burst
        return
    with pytest.raises(ValueError, match=f"'{rate}' is no rate of a link"):
        Machines(2, rate)


def _addresses() -> str:
    return subprocess.run(
        ["ip", "-4", "-oneline", "address"], capture_output=True, text=True, check=True
    ).stdout


def _reordered_packets(rank, size, addresses):
    """Sends and receives 64 MiB at the same time; returns how many packets had been overtaken by then."""
    store = current_store()
    total = 64 << 20
    with socket.create_server((addresses[rank], 0)) as listener:
        store.set(f"port{rank}", str(listener.getsockname()[1]))
        other = (addresses[1 - rank], int(store.get(f"port{1 - rank}")))
        with socket.create_connection(other) as outgoing, ThreadPoolExecutor(1) as sender:
            incoming, _ = listener.accept()
            with incoming:
                sent = sender.submit(outgoing.sendall, bytes(total))
                got = 0
                while got < total and (piece := incoming.recv(1 << 20)):
                    got += len(piece)
                sent.result()
    table = Path("/proc/self/net/netstat").read_text("utf-8")
    names, values = (line.split() for line in table.splitlines() if line.startswith("TcpExt:"))
    return sum(int(values[names.index(name)]) for name in ("TCPSACKReorder", "TCPTSReorder"))


def test_a_link_keeps_the_order_of_packets(make_machines):  # noqa: F811
    machines = make_machines(2, "1gbit")
    addresses = [machines.address(machine) for machine in range(2)]
    reordered = run_ranks(_reordered_packets, 2, addresses, isolated=True, machines=(machines, [0, 1]))
    assert sum(reordered) < 50, reordered  # some hundreds where each processor passes packets on
