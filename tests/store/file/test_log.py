"""What stands in a FileStore's file: its format, and files that are damaged, cut off or of somebody else."""

from __future__ import annotations

import os
import resource
import signal
import struct
import time
import zlib
from datetime import timedelta

import pytest
import torch.distributed as dist

import collectives
from collectives.store import FileStore
from collectives.store.file import HEADER_BYTES, MAGIC, DamagedError, LockedFile, encode_record, records
from collectives.store.memory import Change
from collectives.store.process import Life, ProcessIdentity, _start_of, current_process

SHORT = timedelta(milliseconds=80)


class TestBadFiles:
    def test_something_else(self, path):
        path.write_bytes(b"my thesis")
        with pytest.raises(collectives.DistStoreError, match=r"no file of a FileStore.*b'my thesis'"):
            FileStore(str(path), 1)
        assert path.read_bytes() == b"my thesis"

    def test_torchs_file(self, path):
        theirs = dist.FileStore(str(path), 2)
        theirs.set("key", "value")
        with pytest.raises(collectives.DistStoreError, match="no file of a FileStore"):
            FileStore(str(path), 1)

    @pytest.mark.parametrize("size", [3, 8, HEADER_BYTES - 1])
    def test_a_header_that_was_not_finished(self, path, size):
        store = FileStore(str(path), 2)
        header = path.read_bytes()[:size]
        store.close()
        path.write_bytes(header)
        store = FileStore(str(path), 1)
        store.set("key", "value")
        assert store.get("key") == b"value"
        store.close()

    def test_a_record_that_was_not_finished(self, path):
        one, two = FileStore(str(path), 2), FileStore(str(path), 2)
        one.set("key", "value")
        record = encode_record(Change.SET, "torn", b"x" * 100)
        for size in (1, 7, 8, 9, len(record) - 1):
            with path.open("ab") as file:
                file.write(record[:size])
            assert two.list_keys() == ["key"]
            assert two.get("key") == b"value"
            one.set("key", "value")
            assert two.list_keys() == ["key"]
            assert b"torn" not in path.read_bytes()
        one.close()
        two.close()

    def test_a_damaged_record(self, path):
        one, two = FileStore(str(path), 2), FileStore(str(path), 2)
        one.set("key", "value")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(collectives.DistStoreError, match=r"is damaged at byte \d+ of \d+: .*checksum"):
            two.check(["key"])
        one.close()
        two.close()

    def test_a_header_of_another_version(self, path):
        store = FileStore(str(path), 2)
        content = bytearray(path.read_bytes())
        store.close()
        content[8] = 2
        path.write_bytes(content)
        with pytest.raises(collectives.DistStoreError, match="version 2, this program knows 1"):
            FileStore(str(path), 2)

    def test_a_file_that_was_cut_off(self, path):
        store = FileStore(str(path), 2)
        store.set("key", "value")
        os.truncate(path, HEADER_BYTES)
        with pytest.raises(collectives.DistStoreError, match="cut off"):
            store.get("key")
        store.close()

    def test_a_file_that_was_deleted(self, path):
        store = FileStore(str(path), 2)
        store.set("key", "value")
        path.unlink()
        assert store.get("key") == b"value"
        with pytest.raises(collectives.DistStoreError, match="was deleted or replaced"):
            store.wait(["other"], SHORT)
        path.write_text("not ours")
        store.close()
        assert path.read_text() == "not ours"

    def test_no_folder(self, path):
        with pytest.raises(collectives.DistStoreError, match=f"the folder of {path}/x does not exist"):
            FileStore(f"{path}/x", 1)

    def test_a_folder(self, tmp_path):
        with pytest.raises(collectives.DistStoreError, match="cannot open"):
            FileStore(str(tmp_path), 1)

    def test_no_plain_file(self, path):
        os.mkfifo(path)
        with pytest.raises(collectives.DistStoreError, match="needs a plain file"):
            FileStore(str(path), 1)

    def test_a_symbolic_link(self, path, tmp_path):
        target = tmp_path / "of another user"
        target.touch()
        path.symlink_to(target)
        with pytest.raises(collectives.DistStoreError, match=r"is a symbolic link.*name the file itself"):
            FileStore(str(path), 1)
        assert target.stat().st_size == 0

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
    @pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
    def test_a_file_that_another_user_has_laid_there(self, path, mode):
        path.touch()
        os.chown(path, 12345, -1)
        path.chmod(mode)
        with pytest.raises(collectives.DistStoreError, match=r"belongs to user 12345.*name another file"):
            FileStore(str(path), 1)
        assert path.stat().st_size == 0
        os.chown(path, os.geteuid(), -1)
        FileStore(str(path), 1).close()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
    def test_no_permission(self, path):
        path.touch(mode=0)
        with pytest.raises(collectives.DistStoreError, match=r"no permission.*belongs to user"):
            FileStore(str(path), 1)

    def test_a_full_disk(self, path):
        store = FileStore(str(path), 1)
        store.set("key", "value")
        before = path.stat().st_size
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (before + 10, limits[1]))
        try:
            with pytest.raises(collectives.DistStoreError, match=r"cannot write to .* is not stored"):
                store.set("large", "x" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
        assert path.stat().st_size == before
        assert store.list_keys() == ["key"]
        store.set("large", "x" * 100)
        assert store.get("large") == b"x" * 100
        store.close()

    def test_keys_cannot_be_deleted(self, path):
        store = FileStore(str(path), 1)
        store.set("key", "value")
        with pytest.raises(collectives.DistStoreError, match="cannot delete keys, so 'key' stays"):
            store.delete_key("key")
        assert store.get("key") == b"value"
        store.close()


class TestParts:
    def test_the_life_of_processes(self):
        here = current_process()
        assert ProcessIdentity.from_bytes(here.to_bytes()) == here
        assert here.life() is Life.ALIVE
        assert changed(here, start=here.start + 1).life() is Life.DEAD
        assert changed(here, pid=2**22 + 1).life() is Life.DEAD
        assert changed(here, namespace=1).life() is Life.UNKNOWN
        assert changed(here, host="elsewhere", boot=bytes(16), machine=b"x" * 16).life() is Life.UNKNOWN
        rebooted = changed(here, boot=b"x" * 16)
        assert rebooted.life() is (Life.UNKNOWN if here.machine == bytes(16) else Life.DEAD)

    def test_a_zombie_is_dead(self):
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        zombie = changed(current_process(), pid=pid, start=_start_of(pid))
        assert zombie.life() is Life.ALIVE
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert zombie.life() is Life.DEAD
        os.waitpid(pid, 0)
        assert zombie.life() is Life.DEAD

    def test_the_header_as_documented(self, path):
        store = FileStore(str(path), 5)
        header = path.read_bytes()[:HEADER_BYTES]
        store.close()
        assert HEADER_BYTES == 64
        assert header[:8] == MAGIC == b"\x8bCLSTORE"
        version, checksum = struct.unpack("<II", header[8:16])
        assert (version, checksum) == (1, zlib.crc32(header[16:64]))
        created, world_size = struct.unpack("<Qq", header[32:48])
        assert abs(created / 1e9 - time.time()) < 60
        assert world_size == 5

    def test_records_as_documented(self):
        record = encode_record(Change.SET, "kéy", b"value")
        body = b"\x01" + struct.pack("<I", 4) + "kéy".encode() + b"value"
        assert record == struct.pack("<II", len(body), zlib.crc32(body)) + body
        (read, end), *rest = records(record + record[:-1])
        assert (read.kind, read.key, read.value, end, rest) == (Change.SET, "kéy", b"value", len(record), [])

    @pytest.mark.parametrize(
        "body", [b"", b"\x00", b"\x63", b"\x01\xff\xff\xff\xff", b"\x01\x02\0\0\0x", b"\x06abc", b"\x07abc"]
    )
    def test_records_that_cannot_be(self, body):
        with pytest.raises(DamagedError):
            list(records(struct.pack("<II", len(body), zlib.crc32(body)) + body))


def changed(process, **fields):
    return ProcessIdentity(**(vars(process) | fields))


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.wait(["never"]),
        lambda store: store.queue_pop("never"),
        lambda store: store.barrier("never", 2),
    ],
)
def test_a_stopped_holder_of_the_lock_delays_a_call_little_beyond_its_limit(path, call):
    store = FileStore(str(path), 2)
    store.set_timeout(timedelta(seconds=0.3))
    holder = LockedFile(str(path))  # as of another process: the lock is one of the open file
    with holder.lock(True, 1.0):
        start = time.monotonic()
        with pytest.raises(collectives.DistStoreError, match=r"has held the lock of .* is it stopped"):
            call(store)
        assert time.monotonic() - start < 4
    holder.close()
    store.close()


def test_reading_goes_on_from_the_last_position(path, monkeypatch):
    starts = []
    read = LockedFile.read
    one, two = FileStore(str(path), 2), FileStore(str(path), 2)
    one.set("large", "x" * 100_000)
    assert two.check(["large"])
    monkeypatch.setattr(LockedFile, "read", lambda self, start: (starts.append(start), read(self, start))[1])
    one.set("small", "")
    assert two.check(["small"])
    assert len(starts) == 1
    assert starts[0] > 100_000
    one.close()
    two.close()
