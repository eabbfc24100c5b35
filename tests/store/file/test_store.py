"""The file store: whose file it is, what a crash leaves, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import select
import signal
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import harness
import pytest
from forked import in_child

import collectives
from collectives.store import FileStore

SHORT = timedelta(milliseconds=80)


# Forks a process for each line, which joins a run and stays until it is killed, or ends in order on SIGTERM.
SERVER = """
import json, os, signal, sys
from collectives.store import FileStore
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    path, world_size, variables = json.loads(line)
    pid = os.fork()
    if pid:
        continue
    os.environ.update(variables)
    store = FileStore(path, world_size)
    store.set("old", "left over")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a signal just before pause() would be missed
    print(os.getpid(), flush=True)
    signal.sigwait({signal.SIGTERM})
    store.close()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def member_server(preloaded_python):
    command = [preloaded_python, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        server.kill()


@pytest.fixture
def join(member_server):
    """Makes a process join a run, and returns its id; kills it in the end."""
    pids = []

    def join(path, world_size, variables=None):
        member_server.stdin.write(json.dumps([str(path), world_size, variables or {}]) + "\n")
        member_server.stdin.flush()
        pids.append(int(member_server.stdout.readline()))
        return pids[-1]

    yield join
    for pid in pids:
        end(pid, signal.SIGKILL)


def end(pid, number):
    """Sends a signal, and returns when the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, number)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll()
        os.close(pidfd)


class TestRuns:
    def test_members_share_a_file_that_the_last_one_removes(self, path):
        one, two = FileStore(str(path), 2), FileStore(str(path), 2)
        assert one.path == str(path)
        one.set("key", "value")
        assert two.get("key") == b"value"
        one.close()
        assert path.exists()
        assert two.get("key") == b"value"
        two.close()
        two.close()
        assert not path.exists()
        with pytest.raises(collectives.DistStoreError, match="was closed"):
            two.set("key", "value")

    def test_a_store_that_is_forgotten_leaves(self, path):
        store = FileStore(str(path), 1)
        copy = store.clone()
        del store
        gc.collect()
        copy.set("key", "value")
        assert path.exists()
        del copy
        gc.collect()
        assert not path.exists()

    def test_only_its_user_may_read_it(self, path):
        store = FileStore(str(path), 1)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        store.close()

    def test_an_empty_file_is_taken(self, path):
        path.touch()
        store = FileStore(str(path), 1)
        store.set("key", "value")
        store.close()
        assert not path.exists()

    def test_a_process_may_open_its_own_store_again(self, path):
        store, again = FileStore(str(path), 1), FileStore(str(path), 1)
        store.set("key", "value")
        store.close()
        assert again.get("key") == b"value"
        again.close()
        assert not path.exists()

    def test_a_further_member_belongs_to_another_run(self, path):
        store = FileStore(str(path), 1)
        store.set("key", "value")

        def join():
            with pytest.raises(collectives.DistStoreError) as caught:
                FileStore(str(path), 1)
            return str(caught.value)

        message = in_child(join)
        assert str(path) in message
        assert "all 1 members have joined" in message
        assert f"process {os.getpid()} on {os.uname().nodename}" in message
        assert "which still runs" in message
        assert " s ago" in message
        assert "Name another file, or end that run" in message
        assert store.get("key") == b"value"
        store.close()

    def test_another_world_size_is_another_run(self, path):
        store = FileStore(str(path), 3)
        with pytest.raises(collectives.DistStoreError, match="it has world_size 3, this process 2"):
            FileStore(str(path), 2)
        store.close()

    def test_a_live_run_of_another_process_is_refused(self, path, join):
        pid = join(path, 1)
        with pytest.raises(collectives.DistStoreError, match=f"process {pid} on .*still runs"):
            FileStore(str(path), 1)

    @pytest.mark.parametrize("members", [1, 2], ids=["complete", "incomplete"])
    def test_the_file_of_a_killed_run_is_taken_over(self, path, join, members):
        end(join(path, members), signal.SIGKILL)
        assert path.exists()
        one = FileStore(str(path), 2)
        assert one.list_keys() == []
        two = FileStore(str(path), 2)
        one.set("key", "value")
        assert two.get("key") == b"value"
        two.close()
        one.close()
        assert not path.exists()

    def test_the_killed_creator_of_a_run_that_others_are_in(self, path, join):
        creator, other = join(path, 3), join(path, 3)
        end(creator, signal.SIGKILL)
        with ThreadPoolExecutor(1) as threads:
            late = threads.submit(FileStore, str(path), 3)
            time.sleep(0.2)
            assert not late.done()  # waits for the rest of the run to end
            end(other, signal.SIGKILL)
            store = late.result(20)
        assert store.list_keys() == []
        store.close()

    def test_the_killed_creator_of_a_run_that_goes_on(self, path, join, monkeypatch):
        monkeypatch.setattr("collectives.store.file._ENDING_GRACE_S", 0.1)
        creator, _ = join(path, 3), join(path, 3)
        end(creator, signal.SIGKILL)
        with pytest.raises(
            collectives.DistStoreError,
            match=f"its member, process {creator} on .*, has died, others have not",
        ):
            FileStore(str(path), 3)

    def test_all_take_over_at_once(self, path, join):
        end(join(path, 2), signal.SIGKILL)
        results = harness.run_ranks(exchange_values, 3, str(path))
        assert results == [[b"0", b"1", b"2"]] * 3
        assert not path.exists()

    def test_a_run_that_is_ending_is_waited_for(self, path):
        one, two = FileStore(str(path), 2), FileStore(str(path), 2)
        one.close()
        with ThreadPoolExecutor(1) as threads:
            following = threads.submit(FileStore, str(path), 2)
            time.sleep(0.1)
            assert not following.done()
            two.close()
            store = following.result(10)
        assert store.list_keys() == []
        store.close()

    def test_runs_may_follow_each_other_on_one_path(self, path):
        for _ in range(3):
            assert harness.run_ranks(exchange_values, 2, str(path)) == [[b"0", b"1"]] * 2

    def test_one_process_may_try_again(self, path):
        for _ in range(3):
            FileStore(str(path), 2).close()
        one, two = FileStore(str(path), 2), FileStore(str(path), 2)
        one.close()
        two.close()
        assert not path.exists()

    def test_a_value_for_one_who_comes_later(self, path):
        FileStore(str(path), 2).set("key", "value")
        assert FileStore(str(path), 2).get("key") == b"value"

    def test_a_restart_by_the_launcher_is_another_run(self, path, join, monkeypatch):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        old = join(path, 2, {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"})
        with pytest.raises(
            collectives.DistStoreError, match="launched as 'job, start 0', this process as 'job, start 1'"
        ):
            FileStore(str(path), 2)
        end(old, signal.SIGKILL)
        FileStore(str(path), 2).close()


class TestUnfixedSize:
    def test_the_file_stays_and_keeps_its_keys(self, path):
        one, two = FileStore(str(path)), FileStore(str(path), -7)
        one.set("key", "value")
        two.add("n", 1)
        one.close()
        two.close()
        again = FileStore(str(path))
        assert again.get("key") == b"value"
        assert again.num_keys() == 2
        again.close()
        assert path.exists()

    def test_keys_of_a_run_that_ended_stay(self, path, join):
        end(join(path, -1), signal.SIGTERM)
        store = FileStore(str(path))
        assert store.get("old") == b"left over"
        store.close()

    def test_what_a_killed_member_has_left_does_not(self, path, join):
        end(join(path, -1), signal.SIGKILL)
        store = FileStore(str(path))
        assert store.list_keys() == []
        store.close()

    def test_size_zero(self, path):
        with pytest.raises(ValueError, match="cannot be 0"):
            FileStore(str(path), 0)
        assert not path.exists()


def exchange_values(rank, size, path):
    store = FileStore(path, size)
    store.set(str(rank), str(rank))
    values = store.multi_get([str(other) for other in range(size)])
    store.barrier("done", size)
    store.close()
    return values


def count(rank, size, path, rounds):
    store = FileStore(path, size)
    sums = [store.add("n", 1) for _ in range(rounds)]
    for i in range(rounds):
        store.queue_push("queue", f"{rank} {i}")
    taken = [store.queue_pop("queue") for _ in range(rounds)]
    store.append("all", f"{rank},")
    store.barrier("done", size)
    values = store.get("all")
    store.barrier("read", size)
    store.close()
    return sums, taken, values


class TestProcesses:
    def test_nothing_is_lost_between_processes(self, path):
        results = harness.run_ranks(count, 3, str(path), 40)
        assert sorted(total for sums, _, _ in results for total in sums) == list(range(1, 121))
        taken = [value for _, values, _ in results for value in values]
        assert sorted(taken) == sorted(f"{rank} {i}".encode() for rank in range(3) for i in range(40))
        assert {tuple(sorted(value.split(b","))) for _, _, value in results} == {(b"", b"0", b"1", b"2")}
        assert not path.exists()

    @pytest.mark.full
    def test_a_writer_that_is_killed_spoils_nothing(self, path):
        store = FileStore(str(path))
        for number in range(3):
            # The lost rank writes on until it is killed, which is when the other has answered.
            assert harness.run_ranks(write_then_watch, 2, str(path), number, isolated=True, lost=(0,))[1] > 0
            written = [key for key in store.list_keys() if key.startswith(f"{number} ")]
            assert store.multi_get(written) == [b"x" * 5000] * len(written)
            store.set("key", "value")
            assert store.get("key") == b"value"
        store.close()

    def test_in_a_forked_child(self, path):
        store = FileStore(str(path), 1)
        store.set("key", "value")
        context = multiprocessing.get_context("fork")
        child = context.Process(target=use_in_child, args=(store,))
        child.start()
        assert store.get("answer") == b"value"
        child.join(20)
        assert child.exitcode == 0
        assert path.exists()
        store.close()
        assert not path.exists()


def write_then_watch(rank, size, path, number):
    store = FileStore(path)
    for i in itertools.count() if rank == 0 else ():
        store.multi_set([f"{number} {i} {part}" for part in range(5)], ["x" * 5000] * 5)
    store.get(f"{number} 3 0")
    return store.num_keys()


def use_in_child(store):
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: store.add("n", 1), range(50)))
    store.set("answer", store.get("key"))
    store.close()


def test_nothing_is_left_open(path):
    def descriptors():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for _ in range(50):
        store = FileStore(str(path), 1)
        store.clone().set("key", "value")
        del store
    with pytest.raises(collectives.DistStoreError):
        FileStore(str(path.parent / "no" / "folder"), 1)
    assert descriptors() == before
    assert not path.exists()


def test_a_handler_does_not_destroy_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, refused = FileStore(str(tmp_path / "store")), os.pwrite, []

    def handler(*_: object) -> None:
        try:
            store.set("b", "2")
        except collectives.DistStoreError as error:
            refused.append(str(error))

    def pwrite(*args: object) -> int:
        if not refused:
            signal.raise_signal(signal.SIGUSR1)
        return real(*args)  # type: ignore[arg-type]

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(os, "pwrite", pwrite)
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert "a signal's handler cannot use the store then" in refused[0]
    finally:
        signal.signal(signal.SIGUSR1, before)
        store.close()


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore("store", 1)
    store.set_timeout(timedelta(0))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    with pytest.raises(collectives.DistStoreError, match="'missing'"):
        store.get("missing")
    assert store.path == "store"
    store.close()
    assert not (tmp_path / "store").exists()


def test_a_size_beyond_the_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        FileStore(str(tmp_path / "store"), 2**63)
    assert not (tmp_path / "store").exists()
