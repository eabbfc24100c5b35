"""Our stores in torch's hands: its process groups, prefixes, and C++ code."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist
from store_pairs import BARRIER

from collectives.store import FileStore, HashStore, PrefixStore, Store, TCPStore

LONG = timedelta(seconds=30)


def gloo(rank, size, kind, place):
    """Runs torch's Gloo on a store of ours; also sub-groups, which torch makes over the same store."""
    if kind == "tcp":
        store = TCPStore("127.0.0.1", place, size, rank == 0, LONG)
    elif kind == "client":
        store = TCPStore("127.0.0.1", place, timeout=LONG)
    else:
        store = FileStore(place, size)
    used = PrefixStore("ours", store)
    dist.init_process_group("gloo", store=used, rank=rank, world_size=size, timeout=LONG)
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(size)))]
    gc.collect()
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.broadcast(tensor, 0, group=group)
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    dist.destroy_process_group()
    store.barrier("end", size)
    return tensor.tolist(), objects


without_barrier = pytest.mark.skipif(not BARRIER, reason="stores of this torch have no barrier")


@pytest.mark.parametrize("kind", ["tcp", pytest.param("client", marks=without_barrier), "file"])
def test_gloo(kind, tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True) if kind == "client" else None
    if kind == "tcp":
        probe = TCPStore("127.0.0.1", 0, is_master=True)
        place = probe.port
        probe.close()
    else:
        place = server.port if server else str(tmp_path / "store")
    results = harness.run_ranks(gloo, 3, kind, place)
    assert results == [([6.0] * 3, [0, 1, 2])] * 3


def test_gloo_on_a_hash_store():
    """Ranks as threads; the groups are made by torch's C++ code, which waits for keys without the GIL."""
    store = HashStore()
    store.set_timeout(LONG)

    def run(rank):
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 3, LONG)
        tensor = torch.tensor([rank + 1.0])
        group.allreduce([tensor]).wait()
        return tensor.item()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, range(3))) == [6.0] * 3


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request, tmp_path):
    made = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True),
        "prefix": lambda: PrefixStore("inner", HashStore()),
    }[request.param]()
    made.set_timeout(LONG)
    yield made
    made.close()


def test_is_a_store(store):
    assert isinstance(store, Store)
    assert isinstance(store, dist.Store)


def test_torchs_prefix(store):
    prefix = dist.PrefixStore("a", dist.PrefixStore("b", store))
    prefix.set("key", b"\xff\x00")
    assert store.get("b/a/key") == b"\xff\x00"
    assert prefix.get("key") == b"\xff\x00"
    assert prefix.has_extended_api()
    prefix.multi_set(["x", "y"], [b"\xff", "2"])
    assert prefix.multi_get(["x", "y"]) == [b"\xff", b"2"]
    prefix.append("x", "more")
    assert prefix.compare_set("x", b"\xffmore".decode("latin1").encode("latin1"), "new") == b"new"
    assert prefix.num_keys() == store.num_keys()
    assert prefix._underlying_non_prefix_store is store
    prefix.set_timeout(timedelta(milliseconds=50))
    assert prefix.timeout == store.timeout == timedelta(milliseconds=50)
    with pytest.raises(dist.DistStoreError, match=r"0\.05 s"):
        prefix.get("missing")
    with pytest.raises(dist.DistStoreError, match=r"0\.06 s"):
        prefix.wait(["missing"], timedelta(milliseconds=60))


@pytest.mark.sampled(1)
def test_clones_that_only_torch_holds(store):
    prefix = dist.PrefixStore("a", store)
    copy = prefix.clone()
    gc.collect()
    copy.set("key", "value")
    assert prefix.get("key") == b"value"


@without_barrier
def test_torchs_barrier(store):
    """torch's store-based barrier, and that of its base class, which works through add and wait."""
    prefix = dist.PrefixStore("a", store)
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(prefix.barrier, "barrier", 3, LONG) for _ in range(3)]
        for wait in waits:
            wait.result(30)


def test_our_prefix_over_torchs():
    inner = dist.HashStore()
    store = PrefixStore("b", dist.PrefixStore("a", inner))
    store.set("key", "value")
    assert inner.get("a/b/key") == b"value"
    assert store._underlying_non_prefix_store is inner
    assert store.list_keys() == ["key"]
    assert store.delete_key("key")
    store.set_timeout(timedelta(seconds=9))
    assert inner.timeout == timedelta(seconds=9)


@pytest.mark.parametrize("reader", ["get", "multi_get", "queue_pop"])
def test_a_limit_of_zero_on_torchs_store_finds_what_is_there_and_stays(reader):
    inner = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    store = PrefixStore("a", inner)
    store.set("key", "value")
    store.queue_push("queue", "value")
    inner.set_timeout(timedelta(0))
    read = {
        "get": lambda: store.get("key"),
        "multi_get": lambda: store.multi_get(["key"])[0],
        "queue_pop": lambda: store.queue_pop("queue"),
    }
    assert read[reader]() == b"value"
    assert inner.timeout == store.timeout == timedelta(0)


class NeverInTime(dist.HashStore):
    """A store on whose answer to a wait the way takes longer than the limit."""

    def wait(self, keys, timeout=None):
        raise dist.DistStoreError("wait timeout after 1ms")


def test_no_time_to_wait_is_no_time_limit_of_the_way():
    store = PrefixStore("a", NeverInTime())
    store.set("there", "")
    store.wait(["there"], timedelta(0))
    with pytest.raises(dist.DistStoreError, match="missing"):
        store.wait(["missing"], timedelta(0))


def test_what_is_no_store():
    with pytest.raises(TypeError, match=r"must be a torch\.distributed\.Store, not dict"):
        PrefixStore("a", {})
    with pytest.raises(TypeError, match="prefix must be a str"):
        PrefixStore(1, HashStore())


def alive(kind):
    return [thing for thing in gc.get_objects() if type(thing) is kind]


class TestLife:
    """torch's binding lets the Python half of a store go while C++ code still holds the other."""

    @pytest.mark.sampled(1)
    def test_a_store_that_only_torch_holds(self, store):
        kind, copy = type(store), store.clone()
        before = len(alive(kind))
        prefix = dist.PrefixStore("a", dist.PrefixStore("b", copy))
        del copy
        gc.collect()
        assert len(alive(kind)) == before
        prefix.set("key", "value")
        assert store.get("b/a/key") == b"value"
        assert type(prefix._underlying_non_prefix_store) is kind
        del prefix
        gc.collect()
        assert len(alive(kind)) == before - 1

    @pytest.mark.sampled(1)
    def test_a_store_that_only_torch_holds_in_garbage(self, store):
        kind, ring = type(store), [store.clone()]
        before = len(alive(kind))
        ring.append(ring)
        prefix = dist.PrefixStore("a", ring[0])
        del ring
        gc.collect()
        assert len(alive(kind)) == before
        prefix.set("key", "value")
        assert store.get("a/key") == b"value"
        del prefix
        gc.collect()
        assert len(alive(kind)) == before - 1

    def test_a_server_ends_when_torch_lets_it_go(self):
        prefix = dist.PrefixStore("a", TCPStore("127.0.0.1", 0, is_master=True))
        gc.collect()
        client = TCPStore("127.0.0.1", prefix.underlying_store.port)
        prefix.set("key", "value")
        assert client.get("a/key") == b"value"
        del prefix
        gc.collect()
        with pytest.raises(dist.DistNetworkError):
            client.get("a/key")

    def test_a_store_that_python_got_back_from_torch(self):
        prefix = dist.PrefixStore("a", TCPStore("127.0.0.1", 0, is_master=True))
        gc.collect()
        back = prefix.underlying_store
        del prefix
        gc.collect()
        back.set("key", "value")
        assert back.get("key") == b"value"
        back.close()

    def test_a_file_is_left_when_torch_lets_it_go(self, tmp_path):
        path = tmp_path / "store"
        prefix = dist.PrefixStore("a", FileStore(str(path), 1))
        gc.collect()
        prefix.set("key", "value")
        assert path.exists()
        del prefix
        HashStore()  # looks after others too
        assert not path.exists()

    def test_the_python_half_may_come_back(self):
        store = HashStore()
        prefix = dist.PrefixStore("a", store)
        del store
        store = prefix.underlying_store
        prefix.set("key", "value")
        assert store.get("a/key") == b"value"
        del prefix
        gc.collect()
        assert store.get("a/key") == b"value"

    @pytest.mark.parametrize("kind", ["hash", "tcp"])
    def test_a_group_on_a_store_that_nobody_else_holds(self, kind):
        assert harness.run_ranks(group_on_a_store_of_nobody, 1, kind, isolated=True) == [[1.0, 1.0]]


def group_on_a_store_of_nobody(rank, size, kind):
    def made():
        return HashStore() if kind == "hash" else TCPStore("localhost", 0, is_master=True)

    dist.init_process_group("gloo", store=made(), rank=rank, world_size=size)
    gc.collect()
    group = dist.new_group([0])
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    dist.destroy_process_group()
    del group
    gc.collect()
    assert alive(HashStore) == alive(TCPStore) == []
    return tensor.tolist()
