"""How processes find each other."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import harness
import pytest
import torch.distributed as dist
from ports import free_port

import collectives
from collectives.store import (
    FileStore,
    HashStore,
    PrefixStore,
    TCPStore,
    register_rendezvous_handler,
    rendezvous,
)

pytestmark = pytest.mark.usefixtures("preloaded_python")

LONG = timedelta(seconds=30)
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def environ(monkeypatch):
    """Sets the variables of env://; all others of them are unset."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def set_all(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_all


def join(url, *place, **options):
    """Returns store, rank and size."""
    return next(rendezvous(url, *place, **options))


def join_all(urls, *args):
    """Calls it in threads; returns store, rank and size of each."""
    with ThreadPoolExecutor(len(urls)) as threads:
        joined = [threads.submit(join, url, *args, timeout=LONG) for url in urls]
        return [found.result(30) for found in joined]


def one_is_the_agent(rank, size):
    shared = harness.current_store()
    if rank == 0:
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
        shared.set("port", str(agent.port))
        assert agent.get("key") == b"value"
        return
    port = shared.get("port").decode()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    store, _, _ = join(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timedelta(seconds=20))
    store.set("key", "value")
    store.close()


class TestTcp:
    def test_place_in_the_url(self):
        port = free_port()
        joined = join_all([f"tcp://127.0.0.1:{port}?rank={rank}&world_size=3" for rank in range(3)])
        assert [(type(store), rank, size) for store, rank, size in joined] == [
            (TCPStore, rank, 3) for rank in range(3)
        ]
        joined[2][0].set("key", "value")
        assert joined[0][0].get("key") == joined[1][0].get("key") == b"value"
        assert joined[1][0].timeout == LONG
        for store, _, _ in joined:
            store.close()

    def test_place_in_arguments(self):
        store, rank, size = join(f"tcp://localhost:{free_port()}", 0, 1)
        assert (rank, size, store.host) == (0, 1, "localhost")
        store.close()

    def test_both_if_they_agree(self):
        store, rank, size = join(f"tcp://localhost:{free_port()}?rank=0&world_size=1", 0, 1)
        assert (rank, size) == (0, 1)
        store.close()
        with pytest.raises(ValueError, match=r"rank is 1 in 'tcp://.*', but 0 as an argument"):
            rendezvous("tcp://localhost:1?rank=1&world_size=2", 0)

    def test_ipv6(self):
        try:
            store, _, _ = join(f"tcp://[::1]:{free_port()}", 0, 1)
        except collectives.DistNetworkError as error:
            pytest.skip(str(error))
        assert store.host == "::1"
        store.close()

    def test_once_only(self):
        joined = rendezvous(f"tcp://localhost:{free_port()}", 0, 1)
        next(joined)[0].close()
        with pytest.raises(RuntimeError, match="again"):
            next(joined)

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("tcp://localhost?rank=0&world_size=1", "port number missing"),
            ("tcp://:29500?rank=0&world_size=1", "host or port number missing"),
            ("tcp://localhost:99999?rank=0&world_size=1", "Port out of range"),
            ("tcp://localhost:1", "rank parameter missing, world_size parameter missing"),
            ("tcp://localhost:1?rank=0", "^world_size parameter missing"),
            ("tcp://localhost:1?rank=one&world_size=2", "rank must be a number, is 'one'"),
            ("tcp://localhost:1?rank=2&world_size=2", "rank 2 is out of range .* world_size is 2, .* 0 to 1"),
            ("tcp://localhost:1?rank=-2&world_size=2", "rank -2 is out of range"),
            ("tcp://localhost:1?rank=0&world_size=0", "world_size must be at least 1 .* is 0"),
            ("tcp://localhost:0?rank=0&world_size=2", "port 0 .* other 1 ranks cannot know"),
            ("tcp://239.1.1.1:29500?rank=0&world_size=1", "239.1.1.1 is a multicast address"),
            ("tcp://localhost:1?rank=0&world_size=1&group_name=x", "unknown parameters .*group_name"),
            ("tcp://localhost:1?rank", "cannot read the query"),
        ],
    )
    def test_bad_urls(self, url, message):
        with pytest.raises(ValueError, match=message):
            join(url)

    def test_use_libuv_is_what_the_url_or_the_environment_says(self, monkeypatch):
        for set_to, query, expected in (("1", "", True), ("0", "", False), ("1", "?use_libuv=0", False)):
            monkeypatch.setenv("USE_LIBUV", set_to)
            store, _, _ = join(f"tcp://localhost:0{query}", 0, 1)
            assert store.libuvBackend is expected
            store.close()

    def test_port_zero_alone(self):
        store, _, _ = join("tcp://localhost:0", 0, 1)
        assert store.port > 0
        store.close()

    def test_nobody_answers(self):
        port = free_port()
        said = rf"localhost:{port}: gave up after [\d.]+ s \(limit 0\.3 s\)"
        with pytest.raises(collectives.DistNetworkError, match=said):
            join(f"tcp://localhost:{port}", 1, 2, timeout=timedelta(seconds=0.3))

    def test_some_do_not_come(self):
        with pytest.raises(
            collectives.DistStoreError,
            match=r"^Timed out after [\d.]+ seconds waiting for clients. 1/2 clients joined",
        ):
            join(f"tcp://localhost:{free_port()}", 0, 2, timeout=timedelta(seconds=1))


class TestEnv:
    def test_all_from_the_environment(self, environ):
        environ(MASTER_ADDR="localhost", MASTER_PORT=free_port(), RANK=0, WORLD_SIZE=1)
        store, rank, size = join("env://")
        assert (type(store), rank, size) == (TCPStore, 0, 1)
        store.close()

    def test_place_in_arguments(self, environ):
        environ(MASTER_ADDR="localhost", MASTER_PORT=free_port(), RANK=7, WORLD_SIZE=8)
        store, rank, size = join("env://", 0, 1)
        assert (rank, size) == (0, 1)
        store.close()

    def test_rank_zero_need_not_be_told_its_address(self, environ):
        environ(MASTER_PORT=free_port(), RANK=0, WORLD_SIZE=1)
        store, _, _ = join("env://")
        assert TCPStore("127.0.0.1", store.port).add("n", 1) == 1
        store.close()

    def test_all_that_is_missing_is_named(self, environ):
        with pytest.raises(
            ValueError, match=r"not set: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT\. torchrun"
        ):
            join("env://")
        environ(RANK=1, MASTER_ADDR="localhost")
        with pytest.raises(ValueError, match=r"not set: WORLD_SIZE, MASTER_PORT\."):
            join("env://")
        environ(WORLD_SIZE="")
        with pytest.raises(ValueError, match=r"not set: WORLD_SIZE, MASTER_PORT\."):
            join("env://")

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"RANK": "x"}, "RANK must be a number, is 'x'"),
            ({"MASTER_PORT": "http"}, "MASTER_PORT must be a number, is 'http'"),
            ({"MASTER_PORT": 70000}, "the port must be from 0 to 65535, is 70000"),
            ({"RANK": 2}, "rank 2 is out of range"),
            ({"WORLD_SIZE": -1}, "world_size must be at least 1"),
        ],
    )
    def test_bad_values(self, environ, values, message):
        environ(**({"MASTER_ADDR": "localhost", "MASTER_PORT": 1, "RANK": 0, "WORLD_SIZE": 2} | values))
        with pytest.raises(ValueError, match=message):
            join("env://")

    def test_the_agent_has_the_store(self, environ):
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
        environ(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=agent.port,
            RANK=0,
            WORLD_SIZE=2,
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        store, rank, size = join("env://")
        store.set("key", "value")
        assert agent.get("key") == b"value"
        assert (rank, size) == (0, 2)
        store.close()

    def test_the_agents_port_is_the_agents_by_whatever_name_of_its_machine(self):
        harness.run_ranks(one_is_the_agent, 2, isolated=True)

    def test_rank_0_serves_a_port_that_is_not_the_agents(self, environ):
        environ(MASTER_ADDR="127.0.0.1", MASTER_PORT=1, TORCHELASTIC_USE_AGENT_STORE="True")
        url = f"tcp://127.0.0.1:{free_port()}"
        store, _, _ = join(url, 0, 1, timeout=timedelta(seconds=20))
        store.set("key", "value")
        assert store.get("key") == b"value"
        store.close()

    def test_who_waits_for_a_store_says_so_once(self, environ, monkeypatch, caplog):
        monkeypatch.setattr("collectives.store.tcp.client._SILENT_S", 0.1)
        url = f"tcp://127.0.0.1:{free_port()}"
        with pytest.raises(collectives.DistNetworkError, match="no store server answers"):
            join(url, 1, 2, timeout=timedelta(seconds=1))
        (line,) = caplog.messages
        assert line.startswith(f"no store server answers at {url.removeprefix('tcp://')} since 0.1 s")
        assert "Rank 0 serves the store there, or torchrun's agent" in line


class TestFile:
    def test_ranks_find_each_other(self, tmp_path):
        path = tmp_path / "store"
        joined = join_all([f"file://{path}?rank={rank}&world_size=2" for rank in range(2)])
        assert [(type(store), rank, size) for store, rank, size in joined] == [
            (FileStore, 0, 2),
            (FileStore, 1, 2),
        ]
        joined[0][0].set("key", "value")
        assert joined[1][0].get("key") == b"value"
        assert joined[1][0].timeout == LONG
        assert joined[1][0].path == str(path)
        for store, _, _ in joined:
            store.close()
        assert not path.exists()

    def test_paths_are_taken_as_they_are(self, tmp_path):
        folder = tmp_path / "with space" / "100%25" / "d:"
        folder.mkdir(parents=True)
        store, _, _ = join(f"file://{folder}/file", 0, 1)
        assert store.path == f"{folder}/file"
        assert (folder / "file").exists()
        store.close()

    def test_urls_for_windows(self, tmp_path):
        store, _, _ = join(f"file:////////{tmp_path}/share?rank=0&world_size=1")
        assert store.path == f"//////{tmp_path}/share"
        store.close()

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("file://tmp/store?rank=0&world_size=1", "names the host 'tmp'; .* file:///tmp/store"),
            ("file://?rank=0&world_size=1", "path missing: .* needs a path"),
            ("file:///tmp/a#b?rank=0&world_size=1", "without '#'"),
            ("file:///tmp/store", "rank parameter missing, world_size parameter missing"),
            ("file:///tmp/store?rank=3&world_size=2", "rank 3 is out of range"),
        ],
    )
    def test_bad_urls(self, url, message):
        with pytest.raises(ValueError, match=message):
            join(url)


class TestSchemes:
    def test_one_of_your_own(self, monkeypatch):
        monkeypatch.setattr(sys.modules["collectives.store.rendezvous"], "_handlers", {})
        shared = HashStore()

        def handler(url, **options):
            assert options == {"timeout": LONG}
            yield PrefixStore(url, shared), 1, 2

        register_rendezvous_handler("here", handler)
        store, rank, size = join("here://place", 1, 2, timeout=LONG)
        assert (rank, size) == (1, 2)
        store.set("key", "value")
        assert shared.list_keys() == ["here://place?rank=1&world_size=2/key"]
        with pytest.raises(RuntimeError, match="handler for here:// already"):
            register_rendezvous_handler("here", handler)

    def test_unknown(self):
        for kind in (ValueError, RuntimeError):  # torch raises the second
            with pytest.raises(
                kind, match=r"^No rendezvous handler for 'etcd://h:1'; .*env://, file://, .*tcp://"
            ):
                rendezvous("etcd://h:1")
        with pytest.raises(TypeError, match="must be a str"):
            rendezvous(None)
        with pytest.raises(TypeError, match="interpreted as an integer"):
            rendezvous("tcp://localhost:1", "0")

    def test_unknown_options(self):
        with pytest.raises(TypeError, match="color"):
            join("tcp://localhost:1", 0, 1, color="red")

    def test_signatures_are_torchs(self):
        from torch.distributed import rendezvous as theirs

        for ours, original in (
            (rendezvous, theirs),
            (
                register_rendezvous_handler,
                sys.modules["torch.distributed.rendezvous"].register_rendezvous_handler,
            ),
        ):
            parameters = [inspect.signature(function).parameters.values() for function in (ours, original)]
            names = [[(p.name, p.kind, p.default) for p in ps] for ps in parameters]
            assert names[0] == names[1]


SCRIPT = """
import sys
import torch, torch.distributed as dist
from datetime import timedelta
from collectives.store import FileStore, PrefixStore, rendezvous
store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=30)))
store.set(f"rank{rank}", str(rank))
assert store.multi_get([f"rank{r}" for r in range(size)]) == [str(r).encode() for r in range(size)]
store.barrier("all", size)
ours = PrefixStore("group", store)
dist.init_process_group("gloo", store=ours, rank=rank, world_size=size)
tensor = torch.tensor([rank + 1.0])
dist.all_reduce(tensor)
assert tensor.item() == size * (size + 1) / 2
dist.destroy_process_group()
file = FileStore(sys.argv[1], size)
file.barrier("all", size)
print(f"done {rank} {type(store).__name__} {store!r}\\n", end="")  # one write: there is no buffer
"""


class TestLaunchers:
    @pytest.mark.full
    def test_torchrun(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        port = free_port()
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(port), str(script), str(tmp_path / "store")),
        ]
        environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ, check=False)
        assert done.returncode == 0, done.stderr
        for rank in range(2):
            assert f"done {rank} TCPStore TCPStore(127.0.0.1:{port}, client)" in done.stdout
        assert not (tmp_path / "store").exists()

    @pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
    def test_processes(self, scheme, tmp_path):
        port = free_port()
        url = {"tcp": f"tcp://localhost:{port}", "file": f"file://{tmp_path}/store", "env": "env://"}[scheme]
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        for _ in range(2):  # again at the same place
            assert harness.run_ranks(add_up, 3, url, env=variables) == [6, 6, 6]


def add_up(rank, size, url):
    store, *place = join(url, rank, size, timeout=LONG)
    assert place == [rank, size]
    store.add("sum", rank + 1)
    store.barrier("added", size)
    total = store.add("sum", 0)
    store.barrier("read", size)
    store.close()
    return total
