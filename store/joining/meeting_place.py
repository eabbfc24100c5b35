"""Where processes meet that form a group anew: without a store in common, whoever of them has died.

Each has a *handle*, a text without secrets by which the others find it and know it again: where it listens,
and a proof by the job's secret. Who passes the handles on is the program's business: a store, a scheduler, a
file. All who are to be members get the same ordered handles and an identifier that was not used before, and
meet: the process of the first handle serves a new store on its socket, the others come to it, and there they
see that all mean the same. Neither the members' former store nor any process that is left out is needed.

A process listens from the moment that it is asked for a handle, so that a refused connection tells of its
death, also of one that has not come. Nobody accepts until it serves, which takes no thread.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import collectives._native as _native
from collectives.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    GroupAbortedError,
    PeerLostError,
)
from collectives.forks import call_in_forked_children
from collectives.secret import SECRET, WAY_OUT, derived_key
from collectives.store.joining.agreement import at, await_leavers, conflict, exchange, fail, give_up, told
from collectives.store.joining.known_listeners import KnownListeners, nobody_listens
from collectives.store.prefix import PrefixStore
from collectives.store.process import own_user_only, system
from collectives.store.records import Checked, demand, fetch, fields, publish
from collectives.store.tcp import TCPStore
from collectives.store.tcp.client import UnprovedError
from collectives.store.tcp.interfaces import choose_addresses
from collectives.store.tcp.listen import literal_address, open_listeners
from collectives.store.waiting import delete_keys, missing_text, root_of
from collectives.time_limits import left_until

_FIRST_LIMIT_S = 0.2
_LONGEST_LIMIT_S = 2.0
"""How long connecting to a server is tried before it is asked whether its process is lost."""
_FORM = "collectives-1"
"""What a handle begins with."""
_LONGEST_UUID = 200
_LONGEST_HANDLE = 4096
_DIGITS = re.compile("[0-9a-f]{32}")
_NUMBERS = range(2**31)
"""What ranks and generations can be; the core has room for these."""
_LEAST_LIMIT = timedelta(seconds=10)
"""The least time limit of a store that is served, as that serves later meetings, too."""
_CONNECTED = "connected"
"""Key under which members agree that they are."""
_TELL_LIMIT = timedelta(seconds=2)
"""How much longer members wait for others to be connected than these have for that, who say why they failed;
and how long those may take to say so."""
_PAST = 64
"""How many identifiers a process that serves remembers to be over, for those who come late."""


class Listener:
    """A socket that nobody accepts from, until this process serves a store on it.

    Attributes:
        address: host in numbers, and port.
    """

    def __init__(self, host: str) -> None:
        """Listens.

        Args:
            host: name or address of this machine.

        Raises:
            DistNetworkError: the system refuses.
        """
        first, *others = open_listeners(host, 0)
        for other in others:
            other.close()
        self._socket: socket.socket | None = first
        self._served: TCPStore | None = None
        self._serving = threading.Lock()
        self.address: list[Any] = list(first.getsockname()[:2])
        self.digits = secrets.token_hex(16)
        call_in_forked_children(self, Listener._close_in_child)

    @property
    def served(self) -> TCPStore | None:
        """The store that this process serves here, if it does."""
        return self._served

    def serve(self, purpose: str, timeout: timedelta) -> TCPStore | None:
        """Returns the store that this process serves here from now on; ``None`` once it was closed.

        Args:
            purpose: what its key is for.
            timeout: time limit of the store.
        """
        with self._serving:
            if self._served is None and self._socket is not None:
                self._served = self._serve_on(self._socket, purpose, timeout)
                self._close_socket()
            return self._served

    def _serve_on(self, listening: socket.socket, purpose: str, timeout: timedelta) -> TCPStore:
        """Returns a store served on a socket, which stays open: after a failure it can be tried again."""
        adopted = os.dup(listening.fileno())
        try:
            return PlacedStore(
                purpose, *self.address, is_master=True, timeout=timeout, master_listen_fd=adopted
            )
        except BaseException:
            with contextlib.suppress(OSError):  # the store may have closed it, and the number be another's
                if os.path.sameopenfile(adopted, listening.fileno()):
                    os.close(adopted)
            raise

    def close(self) -> None:
        """Closes the socket, and the store that is served on it; idempotent."""
        with self._serving:
            self._close_socket()
            served, self._served = self._served, None
        if served is not None:
            served.close()

    def _close_in_child(self) -> None:
        self._serving = threading.Lock()  # which a thread of the parent may have held
        self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter
            self._close_socket()


class PlacedStore(TCPStore):
    """A store whose server and clients prove to each other which one it is.

    Args:
        purpose: tells it from all others; what the key is for.
        host: name or address of the server.
        port: its port.
        options: further arguments of :class:`~collectives.TCPStore`.
    """

    def __init__(self, purpose: str, host: str, port: int, **options: Any) -> None:
        self._purpose = purpose
        super().__init__(host, port, wait_for_workers=False, **options)


def connect(
    make: Callable[..., TCPStore],
    timeout: timedelta,
    is_lost: Callable[[], bool],
    gone: Callable[[], DistError],
    late: Callable[[], DistError],
) -> TCPStore:
    """Returns a connection to a store that another process serves, or will soon.

    It has listened all the time, so that whoever is refused knows that it has gone.

    Args:
        make: connects within its ``timeout``.
        timeout: time limit, and that of the store.
        is_lost: whether it is known to have died; asked again and again.
        gone: returns the error where it has.
        late: returns the error where it does not serve in time.

    Raises:
        DistNetworkError: the server is not to be trusted, or cannot be reached.
    """
    end = time.monotonic() + timeout.total_seconds()
    limit = _FIRST_LIMIT_S
    while True:
        try:
            connected = make(timeout=min(timedelta(seconds=limit), left_until(end)))
        except DistNetworkError as error:
            failed: DistError = error
            cause = error.__cause__
        else:
            connected.set_timeout(timeout)
            return connected
        refused = isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED
        if refused or is_lost():
            raise gone() from failed
        if not isinstance(cause, OSError) or isinstance(cause, UnprovedError):
            raise failed
        if time.monotonic() >= end:
            raise late() from failed
        limit = min(2 * limit, _LONGEST_LIMIT_S)


_listeners: weakref.WeakValueDictionary[str, Listener] = weakref.WeakValueDictionary()
"""One for all groups of this process that are found at one host."""

os.register_at_fork(after_in_child=_listeners.clear)


def _host(store: Any) -> str:
    """Returns where those find this process who can be members."""
    if not own_user_only():  # else only processes of this machine can be
        with contextlib.suppress(DistNetworkError):  # a machine without a network
            return choose_addresses(store, one_kernel=False).addresses[0]
    return "localhost"


def _listener(host: str) -> Listener:
    """Returns this process's listener at one of its addresses."""
    found = _listeners.get(host)
    if found is None:
        found = _listeners[host] = Listener(host)
    return found


class Members(NamedTuple):
    """Processes that have met.

    Attributes:
        store: a new store for them alone.
        rank: of this process.
        size: their number.
        global_ranks: of each in its own world, by rank.
        generation: how often the group has taken other members, this time included; the same for all.
        handles: of all, by rank.
    """

    store: PrefixStore
    rank: int
    size: int
    global_ranks: list[int]
    handles: list[str]
    generation: int


class MeetingPlace:
    """Where other processes find this one, for one of its groups.

    Attributes:
        handle: what they are to be given.
    """

    def __init__(self, store: Any = None, *, alone: bool = False) -> None:
        """Listens.

        Args:
            store: a store that the other processes reach, if there is one: they reach this process as this
                one reaches that.
            alone: whether to share no socket with other places of this process, so that it can be closed.

        Raises:
            DistNetworkError: the system refuses to listen, or there is no job secret and the kernel cannot
                tell the users apart.
        """
        host = _host(store)
        self._listener = Listener(host) if alone else _listener(host)
        self._digits = secrets.token_hex(16)
        host, port = self._listener.address
        about = {
            "id": self._digits,
            "host": host,
            "port": port,
            "place": self._listener.digits,
            "system": system() if own_user_only() else "",
            "process": f"{socket.gethostname()}:{os.getpid()}",
        }
        self.handle = _written(about)
        self._used: set[str] = set()
        self._latest = ""
        self._past: deque[str] = deque(maxlen=_PAST)
        self._served: list[_Served] = []

    def invited(self, uuid: int | str, handles: Sequence[str] | AbstractSet[str], where: str) -> Invitation:
        """Checks the arguments of a meeting; nothing is sent.

        Args:
            uuid: identifies the meeting; not used before.
            handles: of all who are to meet, in the order of their ranks; sorted where it is a set.
            where: stands in front of messages.

        Raises:
            TypeError: an argument has another type.
            ValueError: a text is no handle, one comes twice, or this process's is missing.
            DistBackendError: the identifier was used before, or a handle is not proved by the job's secret.
        """
        text = _uuid(uuid, where)
        if isinstance(handles, str) or not isinstance(handles, (Sequence, AbstractSet)):
            raise TypeError(f"{where} handles must be a list of str, but is {handles!r}")
        ordered = sorted(handles) if isinstance(handles, AbstractSet) else list(handles)
        if not ordered:
            raise ValueError(f"{where} handles is empty, but a group has at least one member")
        members = [_read(one, number, where) for number, one in enumerate(ordered)]
        ids = [one["id"] for one in members]
        if len({*ids}) < len(ids):
            twice = next(one for number, one in enumerate(ids) if one in ids[:number])
            places = [number for number, one in enumerate(ids) if one == twice]
            raise ValueError(f"{where} the handles {places} are the same; give each process's once")
        if self._digits not in ids:
            raise ValueError(
                f"{where} the handle of this process is not part of the {len(ids)} handles; a process that "
                "is left out does not call this"
            )
        if text in self._used:
            raise DistBackendError(
                f"{where} the uuid {text} was already used; give all members one that is new, such as "
                "uuid.uuid4().int >> 65"
            )
        return Invitation(self, text, ordered, members, ids.index(self._digits), where)

    def close(self) -> None:
        """Forgets what this process serves for this group; idempotent.

        The socket closes with the last place that uses it.
        """
        served, self._served = self._served, []
        self._forget(served)

    def end(self) -> None:
        """Listens no more, so that those who wait for this process are refused; only of a place alone."""
        self.close()
        self._listener.close()

    def _begin(self, uuid: str) -> None:
        """Lets those who still wait in earlier meetings know that these are over."""
        if self._latest:
            self._past.append(self._latest)
        self._latest = uuid
        self._used.add(uuid)
        served = self._listener.served
        if served is not None and self._past:
            publish(_past_of(served, self._digits), "past", list(self._past))

    def store_at(
        self,
        handle: str | Checked,
        timeout: timedelta,
        where: str,
        is_lost: Callable[[], bool],
        gone: Callable[[], DistError],
        late: Callable[[], DistError],
    ) -> TCPStore:
        """Returns a store that the process of a handle serves, or will soon; this one, where it is its own.

        Args:
            handle: the handle, or what it says.
            timeout: time limit, and that of the store.
            where: stands in front of messages.
            is_lost: as for :func:`connect`, like the next two.
            gone: likewise.
            late: likewise.
        """
        server = _read(handle, 0, where) if isinstance(handle, str) else handle
        purpose = f"store of the meeting place {server['place']}"
        if server["id"] == self._digits:
            served = self._listener.serve(purpose, max(timeout, _LEAST_LIMIT))
            if served is None:
                raise DistBackendError(
                    f"{where} this process was forked since its handle was made; ask for a new one"
                )
            own: TCPStore = served.clone()  # type: ignore[assignment]
            own.set_timeout(timeout)
            return own
        if own_user_only() and server["system"] != system():
            raise DistNetworkError(
                f"{where} the process that is to serve the store runs on another machine, and there is no "
                f"job secret; {WAY_OUT}"
            )
        make = partial(PlacedStore, purpose, server["host"], server["port"])
        return connect(make, timeout, is_lost, gone, late)

    def _serve(self, meeting: PrefixStore) -> None:
        """Takes note that this process serves a meeting, whose keys go once nobody here needs them."""
        self._served.append(_Served(meeting))

    def _met_in(self, store: PrefixStore | None) -> None:
        """Deletes what earlier meetings have left, apart from the stores that somebody here still holds.

        Args:
            store: what the members of the last meeting go on with; ``None`` where another process serves it.
        """
        former = self._served
        if store is not None:
            *former, latest = former
            latest.store = weakref.ref(store)
        over = [one for one in former if one.is_over()]
        self._served = [one for one in self._served if one not in over]
        self._forget(over)

    def _forget(self, over: Sequence[_Served]) -> None:
        if self._listener.served is not None:
            for one in over:
                _empty(one.meeting)


class _Served:
    """A meeting that this process serves.

    Attributes:
        meeting: its part of the store.
        store: what its members go on with; ``None`` where they have not met.
    """

    def __init__(self, meeting: PrefixStore) -> None:
        self.meeting = meeting
        self.store: weakref.ref[PrefixStore] | None = None
        self._asked = False

    def is_over(self) -> bool:
        """Returns whether nobody needs its keys; asked whenever this process has met others since."""
        asked, self._asked = self._asked, True
        if self.store is None:
            return asked  # at first others may still read why it failed
        return self.store() is None


def _empty(store: PrefixStore) -> None:
    """Deletes all keys of a store, if it is there."""
    with contextlib.suppress(DistError):
        delete_keys(store, store.list_keys())


class Invitation:
    """A meeting that this process is about to take part in; see :meth:`MeetingPlace.invited`.

    Attributes:
        uuid: identifies it.
        rank: of this process among its members.
        handles: of all, in order.
    """

    def __init__(
        self,
        place: MeetingPlace,
        uuid: str,
        handles: list[str],
        members: list[Checked],
        rank: int,
        where: str,
    ) -> None:
        self.uuid = uuid
        self.rank = rank
        self.handles = handles
        self._place = place
        self._members = members
        self._where = where
        self._began = time.monotonic()
        self._known = KnownListeners(rank)
        self._known.places = {
            number: [(one["host"], one["port"])] for number, one in enumerate(members) if number != rank
        }

    def meet(
        self,
        timeout: timedelta,
        kind: str,
        global_rank: int,
        generation: int,
        others_are_late: Callable[[], DistError | None] = lambda: None,
        *,
        distinct: bool = False,
    ) -> Members:
        """Waits until all members are here; called by all of them.

        Args:
            timeout: time limit.
            kind: what the members form; must be the same on all.
            global_rank: of this process in its world.
            generation: how often its group has taken other members before.
            others_are_late: called again and again, first after a fifth of a second, while others have not
                come, which may not know that they are to; may return an error that ends it for all.
            distinct: whether all are of one world, so that each has another global rank.

        Raises:
            CollectiveTimeoutError: a process did not come in time; names its rank.
            PeerLostError: a process has died.
            CollectiveMismatchError: members were given other handles, form something else, or have the same
                global rank though they must not.
            GroupAbortedError: the others have met again without this process since.
            DistNetworkError: the first member cannot be reached, or is not to be trusted.
        """
        place, size = self._place, len(self._members)
        end = time.monotonic() + timeout.total_seconds()
        place._begin(self.uuid)
        root = self._store(timeout, others_are_late)
        first = self._members[0]["id"]
        digest = hashlib.sha256(json.dumps(self.handles).encode()).hexdigest()
        meeting = PrefixStore(
            hashlib.sha256(f"{first} {self.uuid}".encode()).hexdigest()[:32],
            root,
            scope=f"meeting {self.uuid} at {first}",
        )
        if self.rank == 0:
            place._serve(meeting)
        asked = f"the {size} handles {digest[:16]}"
        if differs := conflict(meeting, "handles", self.rank, asked):
            error = CollectiveMismatchError(
                f"{differs}; give all members the same list, in the same order, under one uuid"
            )
            give_up(meeting, "members", error)
            raise at(self._where, error)
        self._began = time.monotonic()
        answer: Checked = exchange(
            meeting,
            "members",
            self.rank,
            range(size),
            left_until(end),
            self._where,
            record={
                "kind": kind,
                "layout": _native.LAYOUT_VERSION,
                "global_rank": global_rank,
                "generation": generation,
            },
            check=_member,
            combine=partial(_alike, distinct=distinct),
            read=partial(_met, size=size),
            why=partial(self._why, timeout=timeout),
            look=partial(self._look, root, meeting, others_are_late),
        )
        store = PrefixStore("store", meeting)
        place._met_in(None if self.rank else store)
        return Members(
            store,
            self.rank,
            size,
            answer["global_ranks"],
            self.handles,
            answer["generation"],
        )

    def _store(self, timeout: timedelta, others_are_late: Callable[[], DistError | None]) -> TCPStore:
        """Returns the store of the first member's process."""
        where = self._where

        def is_lost() -> bool:
            if error := others_are_late():
                raise at(where, error)
            return False

        return self._place.store_at(
            self._members[0],
            timeout,
            where,
            is_lost,
            self._server_lost,
            lambda: CollectiveTimeoutError(
                f"{where} timed out: {missing_text([0], timeout)}", 0, missing_ranks=[0]
            ),
        )

    def _server_lost(self) -> DistError:
        return PeerLostError(
            f"{self._where} rank 0, which serves the store of the new members, has died or left; leave it "
            "out as well",
            0,
        )

    def _why(self, ranks: Sequence[int], died: bool, timeout: timedelta) -> DistError:
        if died:
            return PeerLostError(f"rank {ranks[0]} has died", ranks[0])
        text = f"timed out: {missing_text(ranks, timeout)}"
        return CollectiveTimeoutError(text, ranks[0], missing_ranks=ranks)

    def _look(
        self, root: TCPStore, meeting: PrefixStore, others_are_late: Callable[[], DistError | None]
    ) -> DistError | None:
        """Returns the error where a member has died before it came; raises where the others have gone on."""
        if error := others_are_late():
            return error
        past = _past_of(root, self._members[0]["id"])
        if self.rank and past.check(["past"]) and self.uuid in fetch(past, "past", _texts):
            # Of this rank alone: the others have got their answer, and the one who serves has deleted all
            # but what this rank wrote since.
            _empty(meeting)
            raise GroupAbortedError(
                f"{self._where} the meeting {self.uuid} is over: rank 0 has gone on to another one since", 0
            )
        return self._lost_among(range(1, len(self._members)))  # the first one's end ends the store

    @contextlib.contextmanager
    def agreeing(self, members: Members, timeout: timedelta) -> Iterator[Callable[[], DistError | None]]:
        """Has all members go on after what each does within, or all raise the first error of it.

        What it is entered as returns the error where another member has failed, or listens no more; to be
        called again and again.

        Args:
            members: who have met.
            timeout: time limit of what they do.

        Raises:
            DistError: as :meth:`meet`, or what has failed on another member.
        """
        meeting: Any = members.store.underlying_store
        root = root_of(meeting)
        self._began = time.monotonic()
        try:
            yield lambda: told(meeting, _CONNECTED) or self._lost_among(range(members.size))
        except DistError as error:
            root.set_timeout(_TELL_LIMIT)
            first = fail(meeting, _CONNECTED, None, error)
            if str(first) != str(error):
                raise at(self._where, first) from error
            raise
        except BaseException as error:
            root.set_timeout(_TELL_LIMIT)
            fail(meeting, _CONNECTED, None, DistBackendError(f"{type(error).__name__}: {error}", self.rank))
            raise
        exchange(
            meeting,
            _CONNECTED,
            self.rank,
            range(members.size),
            left_until(self._began + (timeout + _TELL_LIMIT).total_seconds()),
            self._where,
            why=partial(self._why, timeout=timeout),
            look=partial(self._look, root, meeting, lambda: None),
        )
        if self.rank == 0:  # which may be about to end the store
            await_leavers(meeting, _CONNECTED)

    @contextlib.contextmanager
    def blaming_server(self) -> Iterator[None]:
        """Names the first member where the members' store fails because that has died.

        Raises:
            PeerLostError: in place of the store's error.
        """
        try:
            yield
        except DistNetworkError as error:
            first = self._members[0]
            if self.rank and nobody_listens((first["host"], first["port"])):
                raise self._server_lost() from error
            raise

    def _lost_among(self, ranks: Sequence[int]) -> DistError | None:
        try:
            self._known.check(ranks, self._began)
        except PeerLostError as error:
            return error.with_traceback(None)  # which would keep descriptors open
        return None


def _past_of(store: TCPStore, first: str) -> PrefixStore:
    """Returns the part of a server's store that tells which meetings at one of its places are over."""
    return PrefixStore(first, store, scope=f"meetings at {first}")


def _uuid(uuid: object, where: str) -> str:
    if isinstance(uuid, bool) or not isinstance(uuid, (int, str)):
        raise TypeError(f"{where} uuid must be an int or a str, but is {uuid!r}")
    text = str(uuid)
    if not 0 < len(text) <= _LONGEST_UUID:
        raise ValueError(f"{where} uuid must have 1 to {_LONGEST_UUID} characters, but has {len(text)}")
    return text


# ---- handles -----------------------------------------------------------------------------------------------


def id_of(handle: object) -> str:
    """Returns what tells a handle's process and group from all others.

    Args:
        handle: the handle; anything that somebody else has given.

    Raises:
        TypeError: it is no text.
        ValueError: it is no handle.
        DistBackendError: it is not proved by the job's secret.
    """
    return str(_read(handle, 0, "of those given,")["id"])


def _written(about: Mapping[str, Any]) -> str:
    text = base64.urlsafe_b64encode(json.dumps(about).encode()).decode().rstrip("=")
    return f"{_FORM}.{text}.{_proof(text)}"


def _proof(text: str) -> str:
    key = derived_key("handles")
    return "" if key is None else hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _read(handle: object, number: int, where: str) -> Checked:
    """Returns what a handle says, once it is proved."""
    if not isinstance(handle, str):
        raise TypeError(f"{where} handles must be a list of str, but handle {number} is {handle!r}")
    if len(handle) > _LONGEST_HANDLE or not handle.isascii():
        raise ValueError(
            f"{where} handle {number} is none: it has {len(handle)} characters, but must be ASCII of at most "
            f"{_LONGEST_HANDLE}: {handle[:80]!r}"
        )
    form, _, rest = handle.partition(".")
    text, _, proof = rest.partition(".")
    if form != _FORM:
        raise ValueError(f"{where} handle {number} is none of this version of collectives: {handle[:80]!r}")
    if not hmac.compare_digest(proof, _proof(text)):
        known = derived_key("handles") is not None
        why = (
            "its process has another job secret, or none"
            if known
            else "its process has a job secret, which this one does not have"
        )
        raise DistBackendError(
            f"{where} handle {number} is not proved by this process's job secret: {why}; set {SECRET}, or "
            f"{SECRET}_FILE, to the same for all processes of the job",
            number,
        )
    try:
        said = json.loads(base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)))
        found = fields(said, id=str, host=str, port=int, place=str, system=str, process=str)
        demand(0 < found["port"] < 2**16, f"the port {found['port']}")
        # A name would have to be looked up, at whatever server whoever wrote it has chosen.
        demand(literal_address(found["host"]) is not None, f"the host {found['host']!r}, which is no address")
        for name in ("id", "place"):
            demand(_DIGITS.fullmatch(found[name]) is not None, f"the {name} {found[name]!r}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} handle {number} cannot be read: {error}") from error
    return found


# ---- what members tell -------------------------------------------------------------------------------------


def _member(record: Any) -> Checked:
    """Checks what a process tells as it comes."""
    found = fields(record, kind=str, layout=int, global_rank=int, generation=int)
    demand(found["global_rank"] in _NUMBERS, f"the rank {found['global_rank']}")
    demand(found["generation"] in _NUMBERS, f"the generation {found['generation']}")
    return found


def _alike(records: Sequence[Checked], distinct: bool) -> Checked:
    """Returns what :func:`_met` takes; raises where they do not form the same, or are the same."""
    first = records[0]
    for rank, one in enumerate(records):
        for key, word in (("kind", "form"), ("layout", "have the layout")):
            if one[key] != first[key]:
                raise CollectiveMismatchError(
                    f"the members {word} {first[key]!r} on rank 0 and {one[key]!r} on rank {rank}; all must "
                    "run the same version, and reconfigure groups of one kind"
                )
    ranks = [one["global_rank"] for one in records]
    twice = next((one for number, one in enumerate(ranks) if distinct and one in ranks[:number]), None)
    if twice is not None:
        raise CollectiveMismatchError(
            f"the members {[number for number, one in enumerate(ranks) if one == twice]} all say that they "
            f"are rank {twice} of the default group; a group of some of a world's ranks takes members of "
            "that world only"
        )
    return {
        "global_ranks": ranks,
        "generation": 1 + max(one["generation"] for one in records),
    }


def _met(answer: Any, size: int) -> Checked:
    """Checks the ranks of all in their worlds, and the generation of the group."""
    found = fields(answer, global_ranks=list, generation=int)
    ranks = found["global_ranks"]
    demand(
        len(ranks) == size and all(type(one) is int and one in _NUMBERS for one in ranks),
        f"the ranks {ranks}",
    )
    demand(found["generation"] - 1 in _NUMBERS, f"the generation {found['generation']}")
    return found


def _texts(record: Any) -> list[str]:
    demand(isinstance(record, list) and {*map(type, record)} <= {str}, f"{record!r}")
    return list(record)
