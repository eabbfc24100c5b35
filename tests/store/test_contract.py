"""What every store does, ours and torch's with ours, in every combination of the two."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from store_pairs import EVERY, LONG, OURS, SHORT, over, skip_without_barrier, without

import collectives

QUICK = 15.0
"""More than a call may take that does not wait. torch's TCPStore looks names up for its log, which takes 5 s
where no name server answers."""

# torch's PrefixStore does not hand queues on to a store that is written in Python.
QUEUES = without(EVERY, "torch-prefix", "our-client-old", "old-torch")
# A prefix over a store of torch's is no better than that: its TCPStore wakes early for a queue and hangs
# up on bad counters, its HashStore wakes nobody for add(), and both serve one thread at a time.
NOT_OVER_TORCHS = without(OURS, "prefix-torch")


def has_queues(request):
    """Tells whether the stores of a test have queues: torch's TCPStore without libuv has none."""
    return "old" not in request.node.callspec.id


def settle(store):
    """Returns when what was written through a handle is stored: torch's TCP clients do not wait for that."""
    store.num_keys()


@over(EVERY)
def test_values(pair):
    one, other = pair
    one.set("text", "value")
    assert one.get("text") == b"value"
    assert other.get("text") == b"value"
    other.set("text", b"\x00\xff" * 3)
    settle(other)
    assert one.get("text") == b"\x00\xff" * 3
    one.set("empty", "")
    settle(one)
    assert other.get("empty") == b""
    assert other.check(["empty", "text"])
    assert not other.check(["empty", "missing"])
    assert one.check([])
    one.set("ключ/键 '\"", "ü")
    assert other.get("ключ/键 '\"") == "ü".encode()
    big = bytes(range(256)) * 4096
    one.set("big", big)
    assert other.get("big") == big


@over(EVERY)
def test_counters(pair):
    one, other = pair
    assert one.add("n", 5) == 5
    assert other.add("n", -7) == -2
    assert one.add("n", 0) == -2
    assert one.get("n") == b"-2"
    one.set("n", "40")
    settle(one)
    assert other.add("n", 2) == 42
    assert one.add("large", 2**62) == 2**62
    assert one.add("new", 0) == 0
    assert one.check(["new"])


@over(without(OURS, "prefix-torch-tcp"))
def test_counter_that_is_none(pair):
    one, other = pair
    one.set("word", "abc")
    with pytest.raises(collectives.DistStoreError, match=r"cannot add 1 to key '([ab]/)*word'.*b'abc'"):
        one.add("word", 1)
    assert one.get("word") == b"abc"
    assert other.add("n", 1) == 1


@over(EVERY)
def test_append(pair):
    one, other = pair
    one.append("key", "po")
    settle(one)
    other.append("key", b"ta")
    settle(other)
    one.append("key", "to")
    assert one.get("key") == b"potato"


@over(EVERY)
def test_compare_set(pair):
    one, other = pair
    assert one.compare_set("key", "expected", "x") == b"expected"
    assert not other.check(["key"])
    assert one.compare_set("key", "", "first") == b"first"
    assert other.compare_set("key", "", "second") == b"first"
    assert other.compare_set("key", "wrong", "second") == b"first"
    assert other.compare_set("key", "first", "second") == b"second"
    assert one.get("key") == b"second"


@over(without(EVERY, "file", "torch-prefix-file"))
def test_delete_key(pair):
    one, other = pair
    one.set("key", "value")
    settle(one)
    assert other.delete_key("key") is True
    assert one.delete_key("key") is False
    assert not one.check(["key"])
    one.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        one.get("key")


@over(EVERY)
def test_multi(pair):
    one, other = pair
    one.multi_set(["a", "b", "c"], ["1", "", b"\xff"])
    assert other.multi_get(["c", "a", "b"]) == [b"\xff", b"1", b""]
    assert other.multi_get(["a", "a"]) == [b"1", b"1"]
    assert one.multi_get([]) == []
    one.multi_set([], [])


@over(OURS)
def test_multi_set_wants_a_value_per_key(pair):
    one, _ = pair
    with pytest.raises(ValueError, match="2 keys, 1 values"):
        one.multi_set(["a", "b"], ["1"])
    assert not one.check(["a"])


@over(OURS)
def test_keys(pair):
    one, other = pair
    before = one.num_keys()
    one.multi_set(["a", "b"], ["1", "2"])
    other.add("c", 1)
    assert other.num_keys() == before + 3
    assert sorted(one.list_keys()) == ["a", "b", "c"]


@over(EVERY)
def test_wait_that_times_out(pair):
    one, _ = pair
    one.set("there", "")
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        one.wait(["there", "missing"], SHORT)
    assert SHORT.total_seconds() * 0.9 <= time.monotonic() - start < QUICK
    one.set("missing", "")
    one.wait(["there", "missing"], LONG)
    one.wait([], LONG)
    one.wait(["there"])


@pytest.mark.sampled(3)
@over(OURS)
def test_errors_of_waits(pair, request):
    one, _ = pair
    one.set("there", "")
    one.set_timeout(SHORT)
    for call in (
        lambda: one.wait(["there", "missing"]),
        lambda: one.get("missing"),
        lambda: one.multi_get(["there", "missing"]),
        *([lambda: one.queue_pop("missing")] if has_queues(request) else []),
    ):
        with pytest.raises(collectives.DistStoreError, match=r"0\.08 s"):
            call()
    one.set("missing", "now")
    assert one.get("missing") == b"now"


@over(NOT_OVER_TORCHS)
def test_errors_of_waits_name_what_is_missing(pair):
    one, _ = pair
    one.set("there", "")
    with pytest.raises(collectives.DistStoreError, match=r"has no key '([ab]/)*missing'"):
        one.wait(["there", "missing"], SHORT)
    words = r"\(wait timeout after 80ms, keys: /([ab]/)*missing\)"  # what programs look for
    with pytest.raises(collectives.DistStoreError, match=words):
        one.wait(["there", "missing"], SHORT)
    with pytest.raises(collectives.DistStoreError, match=r"has no keys .*missing0'.*missing7' and 12 more"):
        one.wait([f"missing{i}" for i in range(20)], SHORT)


@over(OURS)
@pytest.mark.parametrize("limit", [timedelta(0), timedelta(seconds=-1)], ids=["zero", "negative"])
def test_no_time_means_no_waiting(pair, limit, request):
    one, _ = pair
    one.set("there", "")
    one.wait(["there"], limit)
    start = time.monotonic()
    with pytest.raises(collectives.DistStoreError):
        one.wait(["missing"], limit)
    one.set_timeout(limit)
    assert one.get("there") == b""
    queues = [one.queue_pop] if has_queues(request) else []
    for call in (one.get, *queues, lambda key: one.multi_get(["there", key])):
        with pytest.raises(collectives.DistStoreError, match="0 s"):
            call("missing")
    assert time.monotonic() - start < QUICK


WRITES = {
    "set": lambda store: store.set("key", "7"),
    "add": lambda store: store.add("key", 7),
    "append": lambda store: store.append("key", "7"),
    "compare_set": lambda store: store.compare_set("key", "", "7"),
    "multi_set": lambda store: store.multi_set(["other", "key"], ["", "7"]),
}


@over(EVERY)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_wakes(pair, write):
    one, other = pair
    if write is WRITES["add"] and type(getattr(one, "underlying_store", None)) is dist.HashStore:
        pytest.skip("torch's HashStore wakes nobody for add()")
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(other.get, "key")
        time.sleep(0.02)
        write(one)
        assert got.result(10) == b"7"


@over(EVERY)
def test_wait_for_several(pair):
    one, other = pair
    with ThreadPoolExecutor(1) as threads:
        waited = threads.submit(other.wait, ["a", "b", "c"], LONG)
        one.set("b", "")
        one.set("a", "")
        time.sleep(0.05)
        assert not waited.done()
        one.set("c", "")
        waited.result(10)


@over(without(NOT_OVER_TORCHS, "our-client-old"))
def test_a_waiting_thread_delays_no_other(pair):
    one, _ = pair
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(one.wait, [f"key{i}"]) for i in range(3)]
        pop = threads.submit(one.queue_pop, "queue")
        time.sleep(0.02)
        start = time.monotonic()
        assert one.add("n", 1) == 1
        assert not one.check(["key0"])
        assert time.monotonic() - start < QUICK
        one.queue_push("queue", "value")
        assert pop.result(10) == b"value"
        for i in range(3):
            one.set(f"key{i}", "")
        for wait in waits:
            wait.result(10)


@over(QUEUES)
def test_queue(pair):
    one, other = pair
    assert one.queue_len("queue") == 0
    with pytest.raises(dist.QueueEmptyError):
        one.queue_pop("queue", block=False)
    for value in ("a", b"\xff", ""):
        one.queue_push("queue", value)
    settle(one)
    assert other.queue_len("queue") == 3
    assert other.check(["queue"])
    assert other.queue_pop("queue") == b"a"
    assert one.queue_pop("queue") == b"\xff"
    assert one.queue_pop("queue", False) == b""
    assert not one.check(["queue"])
    assert one.queue_len("queue") == 0


@over(QUEUES)
def test_queue_pop_waits(pair):
    one, other = pair
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(other.queue_pop, "queue")
        time.sleep(0.02)
        one.queue_push("queue", "value")
        assert got.result(10) == b"value"
    one.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        one.queue_pop("queue")
    one.queue_push("queue", "later")
    assert one.queue_pop("queue") == b"later"


@over({"our-client-old-torch-server": OURS["our-client-old-torch-server"]})
def test_a_server_without_queues_is_told(pair):
    one, _ = pair
    for call in (
        lambda: one.queue_push("queue", ""),
        lambda: one.queue_pop("queue"),
        lambda: one.queue_len("queue"),
    ):
        with pytest.raises(
            NotImplementedError, match=r"has no queues, as torch's TCPStore with use_libuv=False"
        ):
            call()
    assert one.add("n", 1) == 1


@over(without(OURS, "our-client-old"))
def test_an_empty_queue_is_an_error_of_ours(pair):
    one, _ = pair
    with pytest.raises(collectives.QueueEmptyError, match="empty"):
        one.queue_pop("queue", block=False)


@over(without(NOT_OVER_TORCHS, "our-client-old"))
def test_every_queued_value_is_popped_once(pair):
    count, workers = 40, 4

    def take(store):
        return [store.queue_pop("queue") for _ in range(count // workers)]

    with ThreadPoolExecutor(workers) as threads:
        taken = [threads.submit(take, pair[i % 2]) for i in range(workers)]
        for i in range(count):
            pair[0].queue_push("queue", str(i))
        values = [value for some in taken for value in some.result(20)]
    assert sorted(map(int, values)) == list(range(count))


@pytest.mark.sampled(2)
@over(without(OURS, "file", "our-client", "prefix-torch"))
def test_a_push_wakes_one_waiter(pair):
    one, _ = pair
    begun = threading.Barrier(3)

    def wait(store):
        begun.wait(10)
        store.wait(["queue"], LONG)

    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(wait, store) for store in pair]
        begun.wait(10)
        time.sleep(0.5)  # both wait by now
        one.queue_push("queue", "1")
        done, _ = futures.wait(waits, 10, futures.FIRST_COMPLETED)
        assert len(done) == 1
        _, left = futures.wait(waits, 0.15)
        assert len(left) == 1
        one.queue_push("queue", "2")
        for wait in waits:
            wait.result(10)


@over(without(NOT_OVER_TORCHS, "our-client-old"))
def test_a_push_to_a_queue_does_not_end_a_wait_for_a_key(pair):
    """torch's server keeps a client that it woke for a queue on that queue's list."""
    one, other = pair
    with ThreadPoolExecutor(1) as threads:
        pop = threads.submit(other.queue_pop, "queue")
        time.sleep(0.05)
        one.queue_push("queue", "1")
        assert pop.result(10) == b"1"
        got = threads.submit(other.get, "key")
        time.sleep(0.05)
        one.queue_push("queue", "2")
        time.sleep(0.05)
        assert not got.done()
        one.set("key", "value")
        assert got.result(10) == b"value"
    assert one.queue_pop("queue") == b"2"


@over(EVERY)
def test_barrier(pair, request):
    skip_without_barrier(request)
    one, other = pair
    one.barrier("alone", 1)
    with ThreadPoolExecutor(2) as threads:
        arrived = [threads.submit(store.barrier, "three", 3, LONG) for store in (one.clone(), other.clone())]
        time.sleep(0.05)
        assert not any(waiting.done() for waiting in arrived)
        one.clone().barrier("three", 3)
        for waiting in arrived:
            waiting.result(10)


@over(NOT_OVER_TORCHS)
def test_a_barrier_that_is_given_up_can_be_tried_again(pair, request):
    skip_without_barrier(request)
    one, other = pair
    for _ in range(3):
        with pytest.raises(
            collectives.DistStoreError, match=r"'.*again' gave up after 0\.05 s: 1 of 2 have arrived"
        ):
            one.barrier("again", 2, timedelta(milliseconds=50))
    with ThreadPoolExecutor(1) as threads:
        arrived = threads.submit(other.barrier, "again", 2, LONG)
        time.sleep(0.05)
        assert not arrived.done()
        one.barrier("again", 2, LONG)
        arrived.result(10)


@over(OURS)
def test_barrier_of_none(pair):
    one, _ = pair
    with pytest.raises(ValueError, match="at least 1, not 0"):
        one.barrier("b", 0)
    assert not one.check(["b"])


@over(OURS)
def test_time_limit(pair):
    one, _ = pair
    one.set_timeout(timedelta(seconds=7))
    assert one.timeout == timedelta(seconds=7)
    one.set_timeout(timedelta.max)
    one.set("key", "value")
    assert one.get("key") == b"value"
    with pytest.raises(TypeError, match="timedelta"):
        one.set_timeout(7)


@over(EVERY)
def test_clones_in_threads(pair):
    one, _ = pair
    copy = one.clone()
    one.set("key", "value")
    assert copy.get("key") == b"value"
    with ThreadPoolExecutor(3) as threads:
        sums = threads.map(
            lambda store: [store.add("n", 1) for _ in range(30)], [copy.clone() for _ in range(3)]
        )
        assert sorted(total for some in sums for total in some) == list(range(1, 91))


@over(without(OURS, "prefix"))
def test_a_clone_has_a_time_limit_of_its_own(pair):
    one, _ = pair
    copy = one.clone()
    assert type(copy) is type(one)
    assert copy.timeout == one.timeout
    copy.set_timeout(SHORT)
    assert one.timeout == LONG
    with pytest.raises(collectives.DistStoreError):
        copy.get("missing")


@over(OURS)
def test_extended_api(pair):
    assert all(store.has_extended_api() for store in pair)


@over(OURS)
def test_wrong_types(pair):
    one, _ = pair
    for call in (
        lambda: one.set(1, "value"),
        lambda: one.set("key", 1),
        lambda: one.get(b"key"),
        lambda: one.add("key", 1.5),
        lambda: one.check("key"),
        lambda: one.wait(["a", 1]),
        lambda: one.wait(["a"], 1.0),
        lambda: one.multi_get("key"),
        lambda: one.queue_push("key", None),
    ):
        with pytest.raises((TypeError, AttributeError)):
            call()
    with pytest.raises(ValueError, match="64 bits"):
        one.add("key", 2**63)
    assert not one.check(["key"])


@over(OURS)
def test_names_of_arguments(pair, request):
    """As torch's documentation has them."""
    skip_without_barrier(request)
    one, _ = pair
    one.set(key="key", value="1")
    assert one.get(key="key") == b"1"
    assert one.add(key="n", amount=2) == 2
    one.append(key="key", value="2")
    assert one.check(keys=["key"])
    assert one.compare_set(key="key", expected_value="12", desired_value="3") == b"3"
    assert one.multi_get(keys=["key"]) == [b"3"]
    one.multi_set(keys=["a"], values=["b"])
    one.wait(keys=["a"], timeout=SHORT)
    if has_queues(request):
        one.queue_push(key="q", value="v")
        assert one.queue_len(key="q") == 1
        assert one.queue_pop(key="q", block=False) == b"v"
    one.barrier(key="b", world_size=1, timeout=SHORT)
    one.set_timeout(timeout=LONG)
