"""Processes whose user namespace does not know their user, nor those of others: all have one number there."""

from __future__ import annotations

import ctypes
import os
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import current_store, run_ranks
from strangers import visit
from threads import on_ranks

import collectives
from collectives import DistNetworkError, _native
from collectives.registry.backends import GroupOptions, create_group
from collectives.store import HashStore, TCPStore

OVERFLOW = 65534
ANOTHER_USER = 12345
SECRET = {"COLLECTIVES_SECRET": "a secret that all processes of this job share"}
NO_SECRET = {"COLLECTIVES_SECRET": None, "COLLECTIVES_SECRET_FILE": None, "COLLECTIVES_INSECURE": None}
UNKNOWN_USER = f"this process runs as user {OVERFLOW}, as do all users"
_CLONE_NEWUSER = 0x10000000


def _namespaces_may_be_made() -> bool:
    try:
        return subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not _namespaces_may_be_made(), reason="no user namespaces here")


def enter(number: int | None = None) -> None:
    """Moves this process to a user namespace of its own, which knows its user under a number, if any."""
    user = os.geteuid()
    library = ctypes.CDLL(None, use_errno=True)
    assert library.unshare(_CLONE_NEWUSER) == 0, os.strerror(ctypes.get_errno())
    if number is not None:
        Path("/proc/self/uid_map").write_text(f"{number} {user} 1\n")


def known(rank: int, size: int, numbers: list[int | None]) -> tuple[int, bool]:
    enter(numbers[rank])
    return os.geteuid(), _native.is_own_user(os.geteuid())


@pytest.mark.full
def test_the_number_of_all_unknown_users_stands_for_none() -> None:
    # A namespace that knows one user under this number knows all others under it, too.
    found = run_ranks(known, 3, [None, OVERFLOW, 7], isolated=True)
    assert found == [(OVERFLOW, False), (OVERFLOW, False), (7, True)]


def serve_all_users(rank: int, size: int) -> str:
    enter()
    with pytest.raises(DistNetworkError) as caught:
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return str(caught.value)


def test_without_a_secret_no_store_is_served_that_all_users_could_reach() -> None:
    (said,) = run_ranks(serve_all_users, 1, isolated=True, env=NO_SECRET)
    assert said.startswith(f"{UNKNOWN_USER} whom its user namespace")
    assert "export COLLECTIVES_SECRET_FILE=~/.collectives_secret" in said


def serve_or_visit(rank: int, size: int) -> list[bytes]:
    """Rank 0 serves a store within a namespace, where another user outside visits it."""
    shared = current_store()
    if rank == 1:
        answers = visit(int(shared.get("port")), b"GET", user=ANOTHER_USER)
        shared.set("visited", "")
        return answers
    enter()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared.set("port", str(store.port))
    shared.wait(["visited"])
    store.close()
    return []


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_with_a_secret_a_store_takes_no_stranger_for_its_own_user() -> None:
    assert run_ranks(serve_or_visit, 2, isolated=True, env=SECRET) == [[], [b"auth"]]


def make_a_pair(rank: int, size: int) -> list[str]:
    enter()
    store = HashStore()

    def reduce(number: int) -> str:
        options = GroupOptions(store, number, 2, timedelta(seconds=20), group_name="pair")
        try:
            group: Any = create_group("host", options)
        except collectives.DistError as error:
            return str(error)
        total = torch.ones(1)
        group.allreduce([total]).wait()
        group.shutdown()
        return str(total.item())

    return on_ranks(2, reduce)


@pytest.mark.full
def test_ranks_share_memory_if_they_have_a_secret() -> None:
    assert run_ranks(make_a_pair, 1, isolated=True, env=SECRET) == [["2.0", "2.0"]]
    (told,) = run_ranks(make_a_pair, 1, isolated=True, env=NO_SECRET)
    for said in told:
        assert UNKNOWN_USER in said
