"""Network namespaces as machines: each has an interface of its own on a switch, shaped as the caller asks.

Nothing has a name or a file: a namespace lives as long as a process that sleeps in it, that process lives as
long as this one, and the virtual cables go with the namespaces. So nothing is left behind, however this
process ends. Making them needs the rights of an administrator, and the commands of iproute2 and util-linux.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "link0"
"""Name of the interface that joins a machine to the others, within the machine."""

_LEAST_BURST_BYTES, _MOST_BURST_BYTES = 32 << 10, 256 << 10
_MOST_PACKET_BYTES = 65_536  # the kernel's own limit, unless somebody raises it
_LATE_S = 0.0005
"""So late the kernel may look after a link; what could not be sent meanwhile must be made up for."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)(bit|bps|)", re.IGNORECASE)
_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_NETWORK = "198.18"  # set aside for measuring networks (RFC 2544)
_OURS = 254  # the last number of this process's own address
_CLONE_NEWNET = 0x40000000


class NamespacesUnavailableError(RuntimeError):
    """This machine cannot make them; the message says why."""


@dataclass(frozen=True, slots=True)
class _Machine:
    holder: subprocess.Popen[bytes]
    address: str

    @property
    def namespace(self) -> str:
        return f"/proc/{self.holder.pid}/ns/net"


class Machines:
    """Machines on one switch, and this process's own address there; a context manager.

    Args:
        count: number of machines.
        rate: what each can send, in the units of ``tc`` such as ``"1gbit"``; ``None`` does not limit it.

    Raises:
        NamespacesUnavailableError: the kernel forbids it, or a program is missing.
        ValueError: the count is not between 1 and 250, or the rate is none.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        if not 1 <= count <= 250:
            raise ValueError(f"there can be 1 to 250 machines, but count is {count}")
        burst = None if rate is None else burst_bytes(rate)
        for program, package in _PROGRAMS.items():
            if shutil.which(program) is None:
                raise NamespacesUnavailableError(f"no program {program!r} here; it comes with {package}")
        self._holders: list[subprocess.Popen[bytes]] = []
        self._machines: list[_Machine] = []
        try:
            self._build(count, rate, burst)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Machines:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._machines)

    def namespace(self, machine: int) -> str:
        """Returns the file for :func:`enter`."""
        return self._machines[machine].namespace

    def namespaces_of(self, ranks: int) -> tuple[str, ...]:
        """Returns the file for :func:`enter` of each rank, with equal shares of the ranks on the machines."""
        return tuple(self.namespace(rank * len(self) // ranks) for rank in range(ranks))

    def address(self, machine: int) -> str:
        """Returns a machine's address."""
        return self._machines[machine].address

    def command(self, machine: int, words: Sequence[str]) -> list[str]:
        """Returns the command that runs ``words`` on a machine."""
        return ["nsenter", f"--net={self.namespace(machine)}", *words]

    def write_agent(self, folder: str) -> str:
        """Writes a program that launchers such as ``mpirun`` call as they call ``ssh``; returns its path.

        ``agent [OPTION...] ADDRESS WORD...`` passes options over and has a shell run the words on the machine
        of that address, which is also the machine's name there.

        Args:
            folder: where the program is written.
        """
        cases = "".join(f"{one.address}) net={one.namespace};; " for one in self._machines)
        path = Path(folder, "agent")
        path.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            "name=$1; shift\n"
            f'case $name in {cases}*) echo "no machine has the address $name" >&2; exit 1;; esac\n'
            'exec unshare --uts nsenter --net="$net" sh -c "hostname $name; $*"\n',
            encoding="utf-8",
        )
        path.chmod(0o700)
        return str(path)

    def sent_bytes(self, machine: int) -> int:
        """Returns how many bytes the machine has sent to the switch since it was made, headers included."""
        return self._count(machine, "TX")

    def received_bytes(self, machine: int) -> int:
        """Returns how many bytes have come to the machine."""
        return self._count(machine, "RX")

    def unplug(self, machine: int) -> None:
        """Takes the machine off the switch; nobody is told."""
        _run(self.command(machine, ["ip", "link", "set", INTERFACE, "down"]))

    def close(self) -> None:
        """Ends the machines; whatever runs in them loses its network. Idempotent."""
        for holder in self._holders:
            if holder.stdin is not None:
                holder.stdin.close()
        for holder in self._holders:
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()
        self._holders.clear()
        self._machines.clear()

    def _build(self, count: int, rate: str | None, burst: int | None) -> None:
        switch = self._hold()
        inside = ["link add name switch type bridge", "link set switch up", "link set lo up"]
        network, ours = self._plug_in(switch)
        self.host = f"{network}.{_OURS}"
        """Address of this process, where the machines reach it; not shaped."""
        inside += [f"link set {ours} master switch", f"link set {ours} up"]
        for number in range(count):
            holder = self._hold()
            address = f"{network}.{number + 1}"
            self._machines.append(_Machine(holder, address))
            port = f"port{number}"
            inside.append(f"link add {port} type veth peer name {INTERFACE} netns {holder.pid}")
            inside += [f"link set {port} master switch", f"link set {port} up"]
        _batch(switch, "ip", inside)
        for machine in self._machines:
            address = f"addr add {machine.address}/24 dev {INTERFACE}"
            _batch(machine.holder, "ip", ["link set lo up", address, f"link set {INTERFACE} up"])
            if burst is not None:
                # A packet longer than the burst, headers of its parts included, is cut into parts of the
                # network's length. So many of them cost a machine that plays four links all its processors.
                longest = min(burst // 2, _MOST_PACKET_BYTES)
                _batch(machine.holder, "ip", [f"link set {INTERFACE} gso_max_size {longest}"])
                shape = f"root handle 1: tbf rate {rate} burst {burst}b latency 100ms"
                _batch(machine.holder, "tc", [f"qdisc add dev {INTERFACE} {shape}"])
        if rate is not None:
            self._keep_order(switch)

    def _hold(self) -> subprocess.Popen[bytes]:
        """Returns a process in a namespace of its own that ends when its standard input does."""
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._holders.append(holder)
        if holder.stdout is None or holder.stderr is None:
            raise AssertionError("the pipes that were asked for are missing")
        with holder.stderr:
            if not holder.stdout.read(1):
                reason = holder.stderr.read().decode().strip()
                raise NamespacesUnavailableError(f"no network namespace could be made: {reason}")
        return holder

    @staticmethod
    def _plug_in(switch: subprocess.Popen[bytes]) -> tuple[str, str]:
        """Joins this process's namespace to the switch; returns the network and the switch's interface."""
        taken = _run(["ip", "-4", "-oneline", "address"])
        number = next(n for n in range(256) if f" {_NETWORK}.{(os.getpid() + n) % 256}." not in taken)
        network = f"{_NETWORK}.{(os.getpid() + number) % 256}"
        plug = f"cc{switch.pid}"
        _run(["ip", "link", "add", plug, "type", "veth", "peer", "name", "ours", "netns", str(switch.pid)])
        _run(["ip", "address", "add", f"{network}.{_OURS}/24", "dev", plug])
        _run(["ip", "link", "set", plug, "up"])
        return network, "ours"

    def _keep_order(self, switch: subprocess.Popen[bytes]) -> None:
        """Has the switch take what comes from a machine with one processor, as network cards do with a flow.

        A shaped interface sends from its timer and from whoever sends. Where these run on two processors, the
        packets of a connection overtake each other, and TCP takes that for losses. A kernel for one processor
        has no such file.
        """
        usable = sorted(os.sched_getaffinity(0))
        lines = ["mount -t sysfs sysfs /sys"]
        for number in range(len(self._machines)):
            words = [0] * (usable[-1] // 32 + 1)
            cpu = usable[number % len(usable)]
            words[-1 - cpu // 32] = 1 << cpu % 32
            mask = ",".join(f"{word:08x}" for word in words)
            file = f"/sys/class/net/port{number}/queues/rx-0/rps_cpus"
            lines.append(f"test ! -e {file} || echo {mask} > {file}")
        inside = ["unshare", "--mount", "sh", "-ec", "\n".join(lines)]
        _run(["nsenter", f"--net=/proc/{switch.pid}/ns/net", *inside])

    def _count(self, machine: int, direction: str) -> int:
        lines = _run(self.command(machine, ["ip", "-statistics", "link", "show", INTERFACE])).splitlines()
        heading = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{direction}:"))
        return int(lines[heading + 1].split()[0])


def bytes_a_second(rate: str) -> float:
    """Returns what a link of this rate carries.

    Args:
        rate: in the units of ``tc``, such as ``"1gbit"``.

    Raises:
        ValueError: it is no rate.
    """
    found = _RATE.fullmatch(rate.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{rate!r} is no rate of a link; write it as tc does, such as 1gbit or 200mbit")
    number, power, binary, unit = found.groups()
    each = (1024.0 if binary else 1000.0) ** ("kmgt".index(power.lower()) + 1 if power else 0)
    return float(number) * each / (1 if unit.lower() == "bps" else 8)


def burst_bytes(rate: str) -> int:
    """Returns what a machine with a link of this rate can send at once after a rest.

    As little as fills the link all the same: of messages shorter than that, calls with rests between them
    show the speed of the machine that plays all others, not of the link.

    Args:
        rate: see :func:`bytes_a_second`.

    Raises:
        ValueError: it is no rate.
    """
    return int(min(max(bytes_a_second(rate) * _LATE_S, _LEAST_BURST_BYTES), _MOST_BURST_BYTES))


def check_machines(ranks: int, machines: int, link: str | None) -> None:
    """Checks that ranks can be shared among machines, and that a link has machines to join.

    Args:
        ranks: number of ranks.
        machines: number of machines; 1 for none.
        link: what each can send, see :func:`bytes_a_second`; ``None`` does not limit it.

    Raises:
        ValueError: they do not fit together.
    """
    if ranks % machines:
        raise ValueError(f"{ranks} ranks cannot be shared equally among {machines} machines")
    if link is not None and machines == 1:
        raise ValueError("a link joins machines; ask for 2 or more of them (--machines)")
    if link is not None:
        bytes_a_second(link)


def enter(namespace: str) -> None:
    """Moves the calling thread, and those that it starts from now on, to another network.

    Args:
        namespace: from :meth:`Machines.namespace`.

    Raises:
        OSError: it has gone, or this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace {namespace}: {os.strerror(number)}")


def _batch(holder: subprocess.Popen[bytes], program: str, lines: list[str]) -> None:
    words = [program, "-batch", "-"]
    _run(["nsenter", f"--net=/proc/{holder.pid}/ns/net", *words], "\n".join(lines) + "\n")


def _run(words: Sequence[str], text: str = "") -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NamespacesUnavailableError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
