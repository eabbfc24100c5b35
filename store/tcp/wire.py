"""The wire format of the TCP store, client side: how requests are written and which replies they get.

It is the protocol of :class:`torch.distributed.TCPStore`, so that either end may be torch's. One connection
carries the requests of one client in order. All integers are little endian.

=======  =============================================================================================
key      u64 length, then that many bytes (at most 8 KiB); user keys carry a ``/`` in front
value    u64 length, then that many bytes (at most 8 MiB)
request  u8 command, then the fields below
=======  =============================================================================================

====  ===========  ==================================  ======================================================
code  command      fields                              reply
====  ===========  ==================================  ======================================================
0     VALIDATE     u32 magic ``0x3C85F7CE``            none; must be the first request
1     SET          key, value                          none
2     COMPARE_SET  key, value expected, value desired  value: what the key holds afterwards
3     GET          key                                 value, empty if the key is missing
4     ADD          key, i64                            i64 sum
5     CHECK        u64 n, n keys                       u8: 0 all there, 1 not
6     WAIT         u64 n, n keys                       u8 0, once all are there
7     GETNUMKEYS   none                                i64
8     DELETE_KEY   key                                 i64: 1 removed, 0 was missing
9     APPEND       key, value                          none
10    MULTI_GET    u64 n, n keys                       n values
11    MULTI_SET    u64 n, n times (key, value)         none
12    CANCEL_WAIT  none                                u8 1; ends a WAIT or BARRIER that was not answered yet
13    PING         u32                                 u32, the same
14    QUEUE_PUSH   key, value                          none
15    QUEUE_POP    key                                 i64 n; if n > 0 a value. n is the length before the pop
16    QUEUE_LEN    key                                 i64
17    LIST_KEYS    none                                i64 n, n values: the keys as stored
18    BARRIER      key, i64 members                    u8 0, once that many have arrived
====  ===========  ==================================  ======================================================

A client whose WAIT has run out of time sends CANCEL_WAIT and reads the answer; a STOP_WAITING (0) that was
already under way comes before it. There is no error reply: a server ends the connection of a client whose
request it cannot carry out. Workers that are waited for add 1 to the key ``init/``, which has no slash in
front.

Our server differs from torch's in what this format leaves open. A client that cancels a BARRIER, or goes away
in it, is counted out again. And of keys that are never stored (no slash in front), CHECK tells that the
server is ours (:data:`SERVER_KEY`), and GET why it ended a connection (:data:`REFUSAL_KEY`). torch's server
without libuv has no queues, and ends the connection of who gets a missing key.
"""

from __future__ import annotations

import enum
import struct

MAGIC = 0x3C85F7CE
KEY_PREFIX = b"/"
INIT_KEY = b"init/"
SERVER_KEY = b"collectives"
"""Checks as there at our server, and as missing at torch's; see the end of this module's description."""
REFUSAL_KEY = b"collectives/refused/"
"""With the bytes of a connection's first PING behind it, it reads as why the server ended the connection."""
TURNED_AWAY = b"collectives: "
"""What our server sends before the reason, in the place of a reply, to a client that it cannot keep."""

READY = 0
STOP_WAITING = 0
WAIT_CANCELED = 1

MAX_KEY_BYTES = 8 * 1024
"""Longest key a server accepts, the ``/`` in front included."""
MAX_VALUE_BYTES = 8 * 1024 * 1024
"""Longest value a server accepts in one request; :meth:`Store.append` may grow a value beyond it."""


class Command(enum.IntEnum):
    """First byte of a request."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


def u32(number: int) -> bytes:
    """Returns the bytes of an unsigned 32-bit integer."""
    return struct.pack("<I", number)


def text(data: bytes) -> bytes:
    """Returns a key or a value: its length, then its bytes."""
    return struct.pack("<Q", len(data)) + data
